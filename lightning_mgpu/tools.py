"""What packages need of Python and the system: a user's mistake, files, YAML, commands, memory."""

import contextlib
import ctypes
import difflib
import errno
import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

PACKAGE = __package__.partition(".")[0]
# what a file system says that is full or must not be written
UNWRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
)


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """'did you mean X?' where the last part of a known word is nearly this one's, else nothing."""
    by_end = {last_part(name).lower(): name for name in known}
    near = difflib.get_close_matches(last_part(word).lower(), by_end, n=1, cutoff=0.7)
    return f"did you mean {by_end[near[0]]}?" if near else ""


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]


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


class ConfigDumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 may read as something else, such as 1e5 or y."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if re.match(r"[-+]?\.?\d|[yYnN]$", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


ConfigDumper.add_representer(str, ConfigDumper.represent_text)


def dump_config(config: Any, in_one_line: bool = False) -> str:
    """Options as YAML, without the defaults that jsonargparse cannot write: these count anyway."""
    text: str = yaml.dump(
        without_unwritten(config),
        Dumper=ConfigDumper,
        default_flow_style=in_one_line,
        sort_keys=False,
        allow_unicode=True,
    )
    return text


def without_unwritten(value: Any) -> Any:
    """A nested configuration without a model's lambda, or a callback's `torch.device`."""
    if isinstance(value, dict):
        return {k: without_unwritten(v) for k, v in value.items() if not is_unwritten(v)}
    return [without_unwritten(item) for item in value] if isinstance(value, list) else value


def is_unwritten(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(str(item).startswith("Unable to serialize instance") for item in items)


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
