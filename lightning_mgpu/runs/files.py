"""Files that are whole or not there: written aside, then renamed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write to: once on disk, the file replaces `path`; if the block fails, it goes."""
    part = path.with_name(f".part.{path.name}")  # the suffix stays: some writers go by it
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text file anew, in one step."""
    with replacing(path) as part:
        part.write_text(text)
