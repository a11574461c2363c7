"""Helpers without torch: user errors, ranges of options, atomic writes, subprocesses."""

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
# shared by runs/ and exchanges/: the checkpoint that a run resumes from, and its key for the states
# of an exchange
LAST, EXCHANGE = "last.ckpt", "exchange_states"
PART = ".part."  # prefix of the names of unfinished files

RANGES = {  # smallest and largest value of an option; Lightning and torch accept more
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
    "count": (1, 10**6),  # options of the other subcommands begin here
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
    """A user error. The message contains the given value, what is allowed, and the fix."""


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success fsync and rename it to `path`, on error delete it."""
    part = path.with_name(f"{PART}{path.name}")  # keeps the suffix for writers that use it
    part.unlink(missing_ok=True)  # else a symbolic link would be followed
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
    """Turn any error while a picture is drawn into a warning, so that it does not end a run."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # not for `--help`

    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{filename} could not be written: {type(error).__name__}: {error}")


def run_in_group(command: Sequence[str], output: IO[Any]) -> int:
    """Run a command and return its status. Its processes are killed at the end, even on Ctrl-C."""
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
    """The package started by `python -m`: this one, or a project that depends on it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str((spec and spec.parent.partition(".")[0]) or PACKAGE)


def command() -> str:
    """The command that starts the program, for help and messages: `python -m my_project`."""
    return f"python -m {program()}"


class CheckingParser(ArgumentParser):
    """An ArgumentParser that rejects numbers out of range and empty values."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")  # without the usage lines

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for arg in args:
            if hint := renamed(arg.partition("=")[0]):
                raise UsageError(hint)
            if arg[-1:] == "=" and arg[:-1] in self._option_string_actions:
                raise UsageError(f"{arg} is empty: add a value, or remove the option")
        found, others = super().parse_known_args(args, namespace)
        for name in RANGES.keys() & vars(found).keys():
            values = getattr(found, name)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, (int, float)):  # None: not given
                    check_range(name, value)
        return found, others


def make_parser(name: str, description: str) -> ArgumentParser:
    """A parser for the subcommand `name`, with the program's name in the examples."""
    text = description.replace(f"python -m {PACKAGE}", command())
    options: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    return CheckingParser(f"{command()} {name}", description=text, **options)


def check_range(option: str, value: Any) -> None:
    """Raise a UsageError if a number is out of the option's range, or NaN."""
    low, high = RANGES[option]
    if isinstance(value, bool) or not low <= float(value) <= high:
        raise UsageError(f"--{option}={value}: must be a number from {low:,} to {high:,}")


def renamed(old: str) -> str:
    """`allreduce is called trace now`, or nothing for a name that was not changed."""
    return f"{old} is called {RENAMED[old]} now" if old in RENAMED else ""


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """'did you mean X?' if the last part of a known word is similar, else an empty string."""
    by_end = {last_part(name).lower(): name for name in known}
    near = get_close_matches(last_part(word).lower(), by_end, n=1, cutoff=0.7)
    return f"did you mean {by_end[near[0]]}?" if near else ""


def printable(text: object) -> str:
    """Text of untrusted files without control characters, which could control a terminal."""
    return "".join(char if char.isprintable() or char == "\t" else "?" for char in str(text))


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]
