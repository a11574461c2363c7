"""A user's mistake ends in a few lines: what was given and what to do; `--traceback` shows more."""

import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli.help import OPTIONS
from lightning_mgpu.distributed.processes import PeerFailure
from lightning_mgpu.tools import UsageError, did_you_mean, last_part, printable

TRACEBACK_FLAG = "--traceback"
PACKAGES = (Path(__file__).parents[1], Path(str(lightning.__file__)).parent)
MISSING_EXTRA = re.compile("No module named '(timm|optuna)'")
CLASS_HINT = "a class is given by its name, or by its path: my_package.MyClass"
# lines of jsonargparse that name its internals or repeat the first line, and parts of lines
NOISE_LINE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Parser key|Problem with given class_path|Given value|"
    r"Subclass types expect|a class path|a dict with|Not a valid|Expected a path but|"
    r"Expected a <class 'NoneType'>"
)
NOISE = re.compile(r".*callable class: |\.?( Got value: .*)?$")


@contextmanager
def constructor_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn ValueErrors, missing modules and `more`, as objects are built, into UsageErrors."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and "jsonargparse" in last_frame(cause)[0].parts:
            cause = cause.__cause__
        if "jsonargparse" in last_frame(cause)[0].parts:  # a union's, which tells of all its types
            raise UsageError(explain(str(error), {}, ())) from error
        if isinstance(cause, (ValueError, MisconfigurationException, ModuleNotFoundError, *more)):
            raise UsageError(str(cause)) from error
        raise cause from cause.__cause__  # without what jsonargparse wraps around it


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """End with a few lines and status 2 for a user's mistake, and as Python does for all else."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if show_traceback or not is_mistake(error):
            raise
        # a DataLoader's worker: the exception comes behind the indented lines of its traceback
        text = str(error).strip().rpartition("Traceback (most recent call last):\n")[2]
        lines = [*dropwhile(lambda line: line[:1] == " ", text.splitlines())]
        lines = [line for line in lines if line.strip()] or [type(error).__name__]
        if missing := MISSING_EXTRA.search(str(error)):
            lines = [f"{missing[0]}: pip install {missing[1]}"]
        text = "\n".join(printable(line[:500]) for line in lines[:6])
        rank = getattr(rank_zero_only, "rank", 0)
        is_reason = not isinstance(error, PeerFailure) or text.startswith("waited")
        if rank > 0:
            time.sleep(1)  # the first process, if it ends by the same, ends this one meanwhile
            text = f"[process {rank}] {text}"
        if rank == 0 or is_reason:
            print(f"error: {text} ({TRACEBACK_FLAG} shows where)", file=sys.stderr, flush=True)
        sys.exit(2)


def is_mistake(error: BaseException) -> bool:
    """Whether an exception tells of a wrong input rather than of a defect in the code."""
    # an OSError: a file is missing, a disk is full
    if isinstance(error, (OSError, UsageError, PeerFailure, MisconfigurationException)):
        return True
    # by torch, where a model or its optimizer has changed since a checkpoint
    is_changed = re.match(r"Error\(s\) in loading state_dict|loaded state dict", str(error))
    if is_changed or MISSING_EXTRA.search(str(error)):
        return True
    # Lightning and this package refuse by `raise`; torch's C++ code has no line of its own
    file, line = last_frame(error)
    is_refused = line.startswith("raise") and any(each in file.parents for each in PACKAGES)
    return is_refused and isinstance(error, (ValueError, RuntimeError))


def last_frame(error: BaseException) -> tuple[Path, str]:
    """The file and the line where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return (Path(frames[-1].filename), frames[-1].line or "") if frames else (Path(), "")


def explain(message: str, given: dict[str, Any], options: Iterable[str]) -> str:
    """In one line the option, the value, jsonargparse's reason, and what was probably meant."""
    stripped = [line.strip().removeprefix("- ") for line in message.splitlines()]
    lines = dict.fromkeys(NOISE.sub("", line) for line in stripped if not NOISE_LINE.match(line))
    lines = lines if any(lines) else dict.fromkeys(stripped)
    if len(lines) > 1:  # a strategy may also be a text
        lines.pop("Expected a <class 'str'>", None)
    groups = {option.partition(".")[0] for option in options}
    unknown = [n for n in given if options and f"--{n.partition('.')[0]}" not in groups]
    quoted = [n for n in given if re.search(f"--{n}|['\"]({n}|{last_part(n)})['\"]", message)]
    about = unknown[:1] or quoted
    name = max(about, key=lambda name: (f"--{name}" in message, name.count(".")), default="")
    hint = OPTIONS.get(f"--{name} CLASS", CLASS_HINT)
    hint = hint if re.search("import|has no attribute", message) else ""
    if required := re.search(r"arguments are required: (\w+)", message):
        length = ", or a default, which becomes the length of the run"
        hint = f"add --{name}.{required[1]}=VALUE{length * (required[1] == 'total_steps')}"
    if re.search("unrecognized|not accept", message):
        hint = did_you_mean(name, options)
        if last_part(name) == "save_last":
            hint = "the last epoch is always saved, in last.ckpt"
    about_what = f"--{name}={given[name]}: ".replace("=:", ":") if about else ""
    return about_what + "; ".join(filter(None, [*lines, hint]))
