"""What packages need of Python and the system: a user's mistake, files, commands."""

import contextlib
import os
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

PACKAGE = __package__.partition(".")[0]
# what runs/ and exchanges/ know of each other: a run goes on from this file, and under this key it
# has the states of an exchange
LAST, EXCHANGE = "last.ckpt", "exchange"
PART = ".part."  # how the name of a file that is not finished begins


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write to. The file replaces `path` once it is on disk; after an error it goes."""
    part = path.with_name(f"{PART}{path.name}")  # beside it, and some writers go by the suffix
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
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # not for `--help`

    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{filename} is not right: {type(error).__name__}: {error}")


def run_in_group(command: Sequence[str], output: IO[Any]) -> int:
    """Run a command; returns its status. An exception, such as Ctrl-C, kills its processes, too."""
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
    text = description.replace(f"python -m {PACKAGE}", command())
    options: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    return ArgumentParser(f"{command()} {name}", description=text, **options)


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """'did you mean X?' where the last part of a known word is nearly this one's, else nothing."""
    by_end = {last_part(name).lower(): name for name in known}
    near = get_close_matches(last_part(word).lower(), by_end, n=1, cutoff=0.7)
    return f"did you mean {by_end[near[0]]}?" if near else ""


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]
