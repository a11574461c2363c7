"""Files that are whole or not there: written aside, then renamed.

Whoever looks at one, or is killed while it is written, has the old one or the new one, never half of it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PARTS = ".*.part"
"""What unfinished files are called."""


@contextlib.contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """The name to write to: the file takes the place of `path` after the block, and is removed if the block fails.

    Args:
        sync: Also wait until the disk has it, so that it outlives a power cut, too.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        if sync:
            _sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if sync:
        with contextlib.suppress(OSError):  # where directories cannot be synced
            _sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a text file anew, in one step."""
    with replacing(path) as part:
        part.write_text(text)


def final_name(path: Path) -> str:
    """What a file is called when it is done, be it finished or not."""
    return path.name.removeprefix(".").removesuffix(".part") if path.match(PARTS) else path.name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
