"""A user's mistake ends in one line that says what was given, what is allowed and the fix; `--traceback` shows more."""

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_mgpu.redact import redact

SWITCH = "--traceback"
PACKAGE = Path(__file__).parent
LIGHTNING = Path(lightning.__file__).parent
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)  # full, or not ours
OF_A_UNION = r"Does not validate against any of the Union subtypes[\s\S]*?\nErrors:\n([\s\S]*?)\nGiven value type: "
NO_SUCH_METRIC = "Early stopping conditioned on metric"  # how Lightning's callback begins when nobody logs it
OTHER_PARAMETERS = "Error(s) in loading state_dict for "  # how torch begins when a checkpoint is another model's


class UsageError(Exception):
    """Something the user gave is wrong; the message is the whole story."""


class ToolParser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m lightning_mgpu ')}: {message}")


@contextmanager
def mistakes(about: str = "") -> Iterator[None]:
    """Around building objects from arguments, where every exception tells of a wrong argument: of `about`, if said."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        told = in_one_line(_what_a_constructor_raised(error))
        raise UsageError(f"{about}: {told}" if about else told) from error


def _what_a_constructor_raised(error: BaseException) -> BaseException:
    """What jsonargparse has wrapped, some levels deep; of several types an option takes, what the last has raised."""
    while error.__cause__ is not None:
        if match := re.search(OF_A_UNION, str(error)):
            complaints = [text for text in re.split(r"^  - ", match[1], flags=re.MULTILINE) if text.strip()]
            if told := [text for text in complaints if not text.startswith(("Expected a", "Not a valid subclass"))]:
                return UsageError(re.sub(r"^Problem with given class_path '[\w.]+':\s+", "", told[-1]))
        error = error.__cause__
    return error


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """End the process with one line and status 2 for a mistake of the user's, and as Python does for anything else.

    Ctrl-C, where nothing has handled it, ends it with status 130 and no line.
    """
    try:
        yield
    except KeyboardInterrupt:
        if show_traceback:
            raise
        sys.exit(130)
    except Exception as error:
        if show_traceback or not is_mistake(error):
            raise
        if _is_told_here(error):
            print(f"error: {in_one_line(error)} ({SWITCH} shows where)", file=sys.stderr, flush=True)
        sys.exit(2)


def is_mistake(error: BaseException) -> bool:
    """Whether an exception tells of a wrong input rather than of a defect in somebody's code.

    Lightning's own configuration errors do, and so do the `ValueError`, `OSError` and own types this package raises,
    and a checkpoint that does not fit the model. A full or read-only disk, and a `ValueError` or a missing package that
    Lightning tells of, do, unless a model or dataset of the user's led there: then its lines are what helps.
    """
    if isinstance(error, (UsageError, MisconfigurationException, argparse.ArgumentError)):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith((OTHER_PARAMETERS, NO_SUCH_METRIC)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename) if frames else Path()
    is_ours, is_lightnings = raised_in.is_relative_to(PACKAGE), raised_in.is_relative_to(LIGHTNING)
    if type(error).__module__.startswith("lightning_mgpu.") or (is_ours and isinstance(error, (ValueError, OSError))):
        return True
    is_of_the_disk = isinstance(error, OSError) and error.errno in OF_THE_DISK
    is_refusal = is_lightnings and isinstance(error, (ValueError, ModuleNotFoundError))  # a package it would need
    return (is_of_the_disk or is_refusal) and not any(_is_the_users(frame.filename) for frame in frames)


def _is_the_users(file: str) -> bool:
    """Whether code is neither of this package, nor of an installed one, nor of Python's."""
    libraries = (PACKAGE, Path(os.__file__).parent)
    return (
        not file.startswith("<")
        and not {"site-packages", "dist-packages"}.intersection(Path(file).parts)
        and not any(Path(file).is_relative_to(library) for library in libraries)
    )


def in_one_line(error: BaseException) -> str:
    """The message of an exception as one sentence, without colours, line breaks, links and secrets."""
    text = redact(re.sub(r"\x1b\[[0-9;]*m", "", str(error) or type(error).__name__))
    if isinstance(error, KeyError):  # whose message is the key alone
        text = f"KeyError: {text}"
    if text.startswith(OTHER_PARAMETERS):
        model = text.removeprefix(OTHER_PARAMETERS).partition(":")[0]
        first = re.search(r"(?:size mismatch for |[Kk]ey\(s\) in state_dict: \")([\w.]+)", text)
        return f"the checkpoint is not one of {model}: their parameters differ" + (
            f", first in {first[1]}" if first else ""
        )
    return re.sub(r"\s+", " ", text).strip()


def _is_told_here(error: Exception) -> bool:
    """Wrong values are wrong in every process of `ddp`, and the first one on each machine says so; files may be wrong
    in one alone."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0" and "SLURM_PROCID" not in os.environ  # srun shows all in one
    return rank_zero_only.rank == 0 or is_first or isinstance(error, OSError)  # type: ignore[attr-defined]
