"""What packages need of Python and the system: a user's mistake, files, commands, memory."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from errno import EACCES, EDQUOT, EFBIG, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

PACKAGE = __package__.partition(".")[0]
# what a file system says that is full, must not be written, or has lost a directory
UNWRITABLE = (ENOSPC, EDQUOT, EFBIG, EACCES, EPERM, EROFS, ENOTDIR, ENOENT)


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write to. The file replaces `path` once it is on disk; after an error it goes."""
    part = path.with_name(f".part.{path.name}")  # beside it, and some writers go by the suffix
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def errors_as_warnings(filename: str) -> Iterator[None]:
    """A picture that fails is a warning and never ends a run."""
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{filename} is not right: {type(error).__name__}: {error}")


def run_in_group(command: Sequence[str], output: IO[Any]) -> int:
    """Run a command to its end, with its output in a file; returns its status.

    On Ctrl-C, or any other exception, the processes that it has started are killed with it.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def program() -> str:
    """The package that was started by `python -m`: this one, or a project's that uses it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str((spec and spec.parent.partition(".")[0]) or PACKAGE)


def command() -> str:
    """How the program is started, for help and messages: `python -m my_project`."""
    return f"python -m {program()}"


def make_parser(name: str, description: str) -> ArgumentParser:
    """A parser for the subcommand `name`; the examples in the description get our own name."""
    return ArgumentParser(
        f"{command()} {name}",
        description=description.replace(f"python -m {PACKAGE}", command()),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: memory grows to its peak and stays."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise UsageError("--malloc=keep: this system has another allocator than glibc's")
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: whose end is never given back
    libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: and which grows in large steps
