"""Small helpers that several packages share."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write to: when the block ends the file replaces `path`; if it fails, it goes."""
    part = path.with_name(f".part.{path.name}")  # the suffix stays: some writers go by it
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
