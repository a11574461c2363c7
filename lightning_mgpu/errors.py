"""A user's mistake ends in one line that says what was given, what is allowed and the fix; `--traceback` shows more."""

import argparse
import difflib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

SWITCH = "--traceback"
PACKAGE = Path(__file__).parent


class UsageError(Exception):
    """Something the user gave is wrong; the message is the whole story."""


@contextmanager
def mistakes() -> Iterator[None]:
    """Around reading arguments and building objects from them, where every exception tells of a wrong argument."""
    try:
        yield
    except Exception as error:
        raise UsageError(in_one_line(error)) from error


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """End the process with one line and status 2 for a mistake of the user's, and as Python does for anything else."""
    try:
        yield
    except Exception as error:
        if show_traceback or not is_mistake(error):
            raise
        print(f"error: {in_one_line(error)} ({SWITCH} shows where)", file=sys.stderr)
        sys.exit(2)


def is_mistake(error: BaseException) -> bool:
    """Whether an exception tells of a wrong input rather than of a defect in somebody's code.

    Lightning's own configuration errors do, and so do the `ValueError`, `OSError` and own types this package raises.
    """
    if isinstance(error, (UsageError, MisconfigurationException, argparse.ArgumentError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return type(error).__module__.startswith("lightning_mgpu.") or (ours and isinstance(error, (ValueError, OSError)))


def in_one_line(error: BaseException) -> str:
    """The message of an exception as one sentence; jsonargparse's nested ones reduced to key, value and types."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error) or type(error).__name__)  # without colours
    given = re.search(r"Given value: (.+)", text)
    key = re.search(r'(?:Parser )?[Kk]ey "?([\w.]+)"?', text)
    allowed = re.search(r"Subtypes: [\[(](.*)[\])]", text)
    if given and key and allowed:
        types = re.sub(r"<class '([\w.]+)'>", r"\1", allowed.group(1))
        return f"--{key.group(1)}={given.group(1)} is none of: {types}"
    return re.sub(r"\s+", " ", text).strip()


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """'; did you mean X?' where a known word is close, else nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
