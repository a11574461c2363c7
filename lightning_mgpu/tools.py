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
from typing import IO, Any, NoReturn

PACKAGE = __package__.partition(".")[0]
# what runs/ and exchanges/ know of each other: a run goes on from this file, and under this key it
# has the states of an exchange
LAST, EXCHANGE = "last.ckpt", "exchange_states"
PART = ".part."  # how the name of a file that is not finished begins

RANGES = {  # the smallest and the largest value of an option, where Lightning and torch take others
    "seed_everything": (0, 2**32 - 1),
    "data.batch_size": (1, 10**9),
    "model.label_smoothing": (0, 1),
    "model.lr": (0, 10**6),
    "model.optimizer.lr": (0, 10**6),
    "model.optimizer.momentum": (0, 1),
    "model.optimizer.weight_decay": (0, 10**6),
    "trainer.accumulate_grad_batches": (1, 10**6),
    "trainer.check_val_every_n_epoch": (1, 10**9),
    "trainer.devices": (-1, 4096),
    "trainer.gradient_clip_val": (0, 10**9),
    "trainer.val_check_interval": (1e-9, 10**9),
    "trainer.strategy.outer_lr": (0, 10**6),
    "trainer.strategy.outer_momentum": (0, 1),
    "trainer.strategy.options.fraction": (1e-9, 1),
    "trainer.strategy.options.rank": (1, 10**6),
    "count": (1, 10**6),  # from here on, options of the other subcommands
    "delay_ms": (0, 60_000),
    "devices": (1, 64),
    "speedup": (1e-3, 10**4),
    "machines": (1, 64),
    "mb": (1e-6, 10**6),
    "mbit": (1e-3, 10**6),
    "num_steps": (1, 10**9),
    "repeats": (1, 10**6),
    "slowdown": (1, 10**4),
}


RENAMED = {  # names of earlier versions: options of our strategies, a strategy, a subcommand
    "--trainer.strategy.every": "--trainer.strategy.sync_every",
    "--trainer.strategy.delay": "--trainer.strategy.sync_delay",
    "--trainer.strategy.outer": "--trainer.strategy.outer_step",
    "--trainer.strategy.split": "--trainer.strategy.device_shares",
    "exchange_sign": "exchange_ef_sign",
    "allreduce": "trace",
    "--slow": "--slowdown",
    "--faster": "--speedup",
}


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """The name to write to. The file replaces `path` once it is on disk; after an error it goes."""
    part = path.with_name(f"{PART}{path.name}")  # beside it, and some writers go by the suffix
    part.unlink(missing_ok=True)  # a link would be written through
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


class CheckingParser(ArgumentParser):
    """Refuses numbers out of their ranges, and options with nothing behind their `=`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")  # one line, without the usage

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for arg in args:
            if hint := renamed(arg.partition("=")[0]):
                raise UsageError(hint)
            if arg[-1:] == "=" and arg[:-1] in self._option_string_actions:
                raise UsageError(f"{arg} has no value: give one, or leave the option out")
        found, others = super().parse_known_args(args, namespace)
        for name in RANGES.keys() & vars(found).keys():
            values = getattr(found, name)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, (int, float)):  # it may be left out
                    check_range(name, value)
        return found, others


def make_parser(name: str, description: str) -> ArgumentParser:
    """A parser for the subcommand `name`; the examples in the description get our own name."""
    text = description.replace(f"python -m {PACKAGE}", command())
    options: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    return CheckingParser(f"{command()} {name}", description=text, **options)


def check_range(option: str, value: Any) -> None:
    """Raise a UsageError for a number that is out of the option's range, such as `nan`."""
    low, high = RANGES[option]
    if isinstance(value, bool) or not low <= float(value) <= high:
        raise UsageError(f"--{option}={value}: a number from {low:,} to {high:,}")


def renamed(old: str) -> str:
    """`allreduce is called trace now`, or nothing for a name that was not changed."""
    return f"{old} is called {RENAMED[old]} now" if old in RENAMED else ""


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """'did you mean X?' where the last part of a known word is nearly this one's, else nothing."""
    by_end = {last_part(name).lower(): name for name in known}
    near = get_close_matches(last_part(word).lower(), by_end, n=1, cutoff=0.7)
    return f"did you mean {by_end[near[0]]}?" if near else ""


def printable(text: object) -> str:
    """A text of a file that may be a stranger's, without characters that control a terminal."""
    return "".join(each if each.isprintable() or each == "\t" else "?" for each in str(text))


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]
