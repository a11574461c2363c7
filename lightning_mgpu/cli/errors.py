"""User errors are printed in a few lines: what was given, how to fix it; `--traceback` for more."""

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
CLASS_HINT = "use the name of a class, or its path: my_package.MyClass"
# lines, and parts of lines, that name jsonargparse's internals or repeat the first line
NOISE_LINE = re.compile(
    r"Does not validate|Subtypes:|Errors:|Parser key|Problem with given class_path|Given value|"
    r"Subclass types expect|a class path|a dict with|Not a valid|Expected a path but|"
    r"Expected a <class 'NoneType'>"
)
NOISE = re.compile(r".*callable class: |\.?( Got value: .*)?$")


@contextmanager
def constructor_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn ValueErrors, missing modules and `more` into UsageErrors while objects are built."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and "jsonargparse" in last_frame(cause)[0].parts:
            cause = cause.__cause__
        if "jsonargparse" in last_frame(cause)[0].parts:  # a union's, which lists all its types
            raise UsageError(explain(str(error), {}, ())) from error
        if isinstance(cause, (ValueError, MisconfigurationException, ModuleNotFoundError, *more)):
            raise UsageError(str(cause)) from error
        raise cause from cause.__cause__  # without what jsonargparse wraps around it


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """Exit with a few lines and status 2 after a user error; other exceptions propagate."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if show_traceback or not is_mistake(error):
            raise
        # a DataLoader worker's exception follows the indented lines of its traceback
        text = str(error).strip().rpartition("Traceback (most recent call last):\n")[2]
        lines = [*dropwhile(lambda line: line[:1] == " ", text.splitlines())]
        lines = [line for line in lines if line.strip()] or [type(error).__name__]
        if missing := MISSING_EXTRA.search(str(error)):
            lines = [f"{missing[0]}: pip install {missing[1]}"]
        text = "\n".join(printable(line[:500]) for line in lines[:6])
        rank = getattr(rank_zero_only, "rank", 0)
        is_reason = not isinstance(error, PeerFailure) or text.startswith("waited")
        if rank > 0:
            time.sleep(1)  # if process 0 fails for the same reason, it kills this process first
            text = f"[process {rank}] {text}"
        if rank == 0 or is_reason:
            print(f"error: {text} ({TRACEBACK_FLAG} shows where)", file=sys.stderr, flush=True)
        sys.exit(2)


def is_mistake(error: BaseException) -> bool:
    """Whether an exception is caused by wrong input rather than by a bug."""
    # an OSError: a file is missing, a disk is full
    if isinstance(error, (OSError, UsageError, PeerFailure, MisconfigurationException)):
        return True
    # raised by torch if a model or its optimizer has changed since a checkpoint
    is_changed = re.match(r"Error\(s\) in loading state_dict|loaded state dict", str(error))
    if is_changed or MISSING_EXTRA.search(str(error)):
        return True
    # Lightning and this package validate with `raise`; torch's C++ code has no Python line
    file, line = last_frame(error)
    is_raised = line.startswith("raise") and any(path in file.parents for path in PACKAGES)
    return is_raised and isinstance(error, (ValueError, RuntimeError))


def last_frame(error: BaseException) -> tuple[Path, str]:
    """The file and the source line that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return (Path(frames[-1].filename), frames[-1].line or "") if frames else (Path(), "")


def explain(message: str, given: dict[str, Any], options: Iterable[str]) -> str:
    """One line: the option, its value, jsonargparse's reason, and what was probably meant."""
    stripped = [line.strip().removeprefix("- ") for line in message.splitlines()]
    lines = dict.fromkeys(NOISE.sub("", line) for line in stripped if not NOISE_LINE.match(line))
    lines = lines if any(lines) else dict.fromkeys(stripped)
    if len(lines) > 1:  # a strategy may also be a string
        lines.pop("Expected a <class 'str'>", None)
    groups = {option.partition(".")[0] for option in options}
    unknown = [n for n in given if options and f"--{n.partition('.')[0]}" not in groups]
    quoted = [n for n in given if re.search(f"--{n}|['\"]({n}|{last_part(n)})['\"]", message)]
    about = unknown[:1] or quoted
    name = max(about, key=lambda name: (f"--{name}" in message, name.count(".")), default="")
    hint = OPTIONS.get(f"--{name} CLASS", CLASS_HINT)
    hint = hint if re.search("import|has no attribute", message) else ""
    if required := re.search(r"arguments are required: (\w+)", message):
        length = ", or give it a default, which is replaced by the length of the run"
        hint = f"add --{name}.{required[1]}=VALUE{length * (required[1] == 'total_steps')}"
    if re.search("unrecognized|not accept", message):
        hint = did_you_mean(name, options)
        if last_part(name) == "save_last":
            hint = "the last epoch is always saved, in last.ckpt"
    about_what = f"--{name}={given[name]}: ".replace("=:", ":") if about else ""
    return about_what + "; ".join(filter(None, [*lines, hint]))
