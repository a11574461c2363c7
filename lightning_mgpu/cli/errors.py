"""A mistake of the user's ends in a few lines that say what was given and what to do; `--traceback` shows more.

Parsing is always the user's mistake. In constructors the type of the exception tells. Whatever the user's own code
raises later keeps its traceback.
"""

import argparse
import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.runs.errors import ToolParser, UsageError

__all__ = ["SWITCH", "ToolParser", "UsageError", "in_lines", "is_mistake", "mistakes", "one_line_errors"]

SWITCH = "--traceback"
PACKAGE = Path(__file__).parents[1]
MOST_LINES, MOST_CHARACTERS = 6, 300
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full, or not to be written
OTHER_PARAMETERS = "Error(s) in loading state_dict for "  # how torch begins when a checkpoint is another model's
BEGINNINGS = (  # of errors that tell of a mistake: this one, a metric that nobody logs, what a launcher says otherwise
    *(OTHER_PARAMETERS, "Early stopping conditioned on metric", "You set `devices=", "You set `num_nodes="),
)


@contextmanager
def mistakes(*more: type[Exception]) -> Iterator[None]:
    """Around constructors: a `ValueError` tells of a wrong argument, and so do a missing package and the types named.

    Anything else is raised as the constructor raised it, without what jsonargparse wraps around it.
    """
    try:
        yield
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None and not isinstance(first, UsageError):
            first = first.__cause__
        if isinstance(first, (ValueError, MisconfigurationException, ModuleNotFoundError, *more)):
            raise UsageError(str(first)) from error
        raise first from None


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """End the process with a few lines and status 2 for a mistake of the user's, and as Python does for anything else.

    Ctrl-C, where nothing has handled it, ends the process with status 130 and no line.
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
        # wrong values are wrong in every process of `ddp`, and the first one says so; files may be wrong in one alone
        if rank_zero_only.rank == 0 or isinstance(error, OSError):  # type: ignore[attr-defined]
            print(f"error: {in_lines(error)} ({SWITCH} shows where)", file=sys.stderr, flush=True)
        sys.exit(2)


def is_mistake(error: BaseException) -> bool:
    """Whether an exception tells of a wrong input rather than of a defect in somebody's code."""
    if isinstance(error, (UsageError, MisconfigurationException, argparse.ArgumentError)):
        return True
    if isinstance(error, (RuntimeError, ValueError)) and str(error).startswith(BEGINNINGS):
        return True
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        return True
    if type(error).__module__.startswith("lightning_mgpu."):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return raised_here and isinstance(error, (ValueError, OSError))  # of a data module or a strategy of this package


def in_lines(error: BaseException) -> str:
    """The message of an exception in at most six lines of moderate length."""
    text = str(error) or type(error).__name__
    if text.startswith(OTHER_PARAMETERS):
        text = f"the checkpoint is not one of {text.removeprefix(OTHER_PARAMETERS)}"
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][:MOST_LINES]
    return "\n".join(line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..." for line in lines)
