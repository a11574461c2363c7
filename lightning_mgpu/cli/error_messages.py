"""A user's mistake ends in a few lines: what was given and what to do; `--traceback` shows more.

An error in parsing is always the user's mistake. In constructors it depends on the type of the
exception. Exceptions that the user's own code raises later keep their traceback, and so do errors
from torch's C++ code, through which a GPU reports its errors. Layers that do not fit each other end
in few lines.
"""

import difflib
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonargparse
import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_mgpu.errors import UsageError
from lightning_mgpu.runs.directory import SHOWS

TRACEBACK_FLAG = "--traceback"
JSONARGPARSE = Path(jsonargparse.__file__).parent
PACKAGES = (Path(__file__).parents[1], Path(str(lightning.__file__)).parent)
MAX_LINES, MAX_CHARACTERS = 6, 300
# how torch says that tensors do not fit each other
SHAPES = re.compile(
    r"\bshapes?\b|size of tensor|input of size|\bchannels\b|match the size|batch_size|D input"
)
# how torch begins when a checkpoint is another model's
OTHER_PARAMETERS = "Error(s) in loading state_dict for "
# what is said of a class that is derived from another package's
OTHER_PACKAGE = re.compile(r"does not correspond to a subclass of|^`model` must be a `Lightning")
# beginnings of lines that name jsonargparse's internals, or repeat the first line
NOISE = (
    *(
        "Does not validate against any",
        "Subtypes:",
        "Errors:",
        "Parser key ",
        "Problem with given class_path",
    ),
    *(
        "Expected a <class 'NoneType'>",
        "Expected a <class 'str'>",
        "Expected a typing.Literal[False]",
        "Expected a path but",
        "Not a valid subclass of ",
    ),
    *("Given value", "Subclass types expect one of", "a class path (str)", "a dict with"),
)
BEFORE, AFTER = "callable class: ", " Got value: "  # around what a long line says
OPTION_BASES: tuple[type, ...] = (
    LightningModule,
    LightningDataModule,
    Optimizer,
    LRScheduler,
    Callback,
    Logger,
)
ADVICE: dict[type[Exception], str] = {  # for errors of a device, below their traceback
    torch.OutOfMemoryError: "The device's memory is full: try a smaller batch size.",
    torch.AcceleratorError: (
        "Devices report errors late: with CUDA_LAUNCH_BLOCKING=1 the traceback ends at the cause,\n"
        "which is often a label that is not less than the number of classes."
    ),
}
# packages that only an extra of pyproject.toml brings, by the names they are imported by
EXTRAS = {
    "timm": "fast",
    "optuna": "sweep",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
}
MISSING_PACKAGE = re.compile(r"No module named '(\w+)")
CLASS_PATH_HINT = "a class is given by its name, or by its path: my_package.MyClass"


@contextmanager
def constructor_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn errors that tell of a wrong argument, raised while objects are built, into UsageErrors.

    These are ValueError, ModuleNotFoundError and `more`. Any other exception is raised as the
    constructor raised it, without what jsonargparse wraps around it.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and JSONARGPARSE in _last_file(cause).parents:
            cause = cause.__cause__
        if isinstance(cause, (ValueError, MisconfigurationException, ModuleNotFoundError, *more)):
            raise UsageError(str(cause)) from error
        raise cause from cause.__cause__


@contextmanager
def one_line_errors(show_traceback: bool) -> Iterator[None]:
    """End with a few lines and status 2 for a user's mistake, and as Python does for anything else.

    Ctrl-C, where nothing has handled it, ends the process with status 130 and no line.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if show_traceback or not is_user_error(error):
            for kind, advice in ADVICE.items():
                if isinstance(error, kind):
                    error.add_note(advice)
            raise
        # every process has the wrong values, and the first one says so; a file may lack in any one
        if rank_zero_only.rank == 0 or isinstance(error, OSError):  # type: ignore[attr-defined]
            notes = [note for note in getattr(error, "__notes__", []) if note.endswith(SHOWS)]
            where = (notes or [f"{TRACEBACK_FLAG}{SHOWS}"])[-1]
            text = shorten(error) + (_where(error) if is_shape_error(error) else "")
            print(f"error: {text} ({where})", file=sys.stderr, flush=True)
        sys.exit(2)


def is_user_error(error: BaseException) -> bool:
    """Whether an exception is due to a wrong input rather than to a defect in the code."""
    if isinstance(error, (UsageError, MisconfigurationException, ArgumentError)):
        return True
    if str(error).startswith((OTHER_PARAMETERS, "`model` must be a `LightningModule`")):
        return True
    if is_shape_error(error):
        return True
    if isinstance(error, ModuleNotFoundError) and how_to_install(str(error)):
        return True
    if not any(each in _last_file(error).parents for each in PACKAGES):
        return False
    if isinstance(error, RuntimeError):
        # torch's C++ code has no frame: its errors, a GPU's too, seem to come from its caller.
        frames = traceback.extract_tb(error.__traceback__)
        return (frames[-1].line or "").startswith("raise")
    return isinstance(error, (ValueError, OSError))


def is_shape_error(error: BaseException) -> bool:
    """Whether a model's layers, or its data, do not fit each other: torch's message says how."""
    layers = Path(torch.__file__).parent / "nn"
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    is_torchs = type(error) is RuntimeError and any(layers in file.parents for file in files)
    is_torchs |= type(error) is ValueError and layers in _last_file(error).parents
    return is_torchs and SHAPES.search(str(error)) is not None


def _where(error: BaseException) -> str:
    """The last line of the user's own code in the traceback, if there is one."""
    others = (*PACKAGES, Path(torch.__file__).parent, Path(sys.prefix))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(each in Path(frame.filename).parents for each in others):
            return f"\n  in {frame.name}, {frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _last_file(error: BaseException) -> Path:
    """Where an exception was raised; nowhere if it was not."""
    return Path(*(frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:]))


def shorten(error: BaseException) -> str:
    """The message of an exception in at most six lines of moderate length."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    hint = how_to_install(str(error))
    if OTHER_PACKAGE.search(str(error)) and "pytorch_lightning" in sys.modules:
        hint = "classes of pytorch_lightning are others: import lightning.pytorch instead"
    if hint:
        lines[MAX_LINES - 1 :] = [hint]
    return "\n".join(map(_shorten_line, lines[:MAX_LINES]))


def how_to_install(message: str) -> str:
    """What to install if a message says that a package of an extra is missing, else nothing."""
    missing = MISSING_PACKAGE.search(message)
    if missing is None or missing[1] not in EXTRAS:
        return ""
    return f'to install it: pip install {missing[1]}, or pip install -e ".[{EXTRAS[missing[1]]}]"'


def _shorten_line(line: str) -> str:
    """A line of moderate length, which ends with a whole word."""
    if len(line) <= MAX_CHARACTERS:
        return line
    cut = line[: MAX_CHARACTERS - 3]
    return f"{cut[: cut.rfind(' ')] if ' ' in cut.strip() else cut} ..."


def explain(message: str, given: dict[str, Any], options: Iterable[str]) -> str:
    """The option and the value given, jsonargparse's reason, and what was probably meant."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    lines = [line.rpartition(BEFORE)[2].partition(AFTER)[0] for line in lines]
    lines = [line for line in dict.fromkeys(lines) if line and not line.startswith(NOISE)][
        : MAX_LINES - 2
    ]
    quoted = message.replace('"', "'")
    about = [
        n
        for n in given
        if f"--{n}" in message or f"'{n}'" in quoted or f"'{last_part(n)}'" in quoted
    ]
    if missing := MISSING_PACKAGE.search(message):
        about = [n for n in about if str(given[n]).startswith(f"{missing[1]}.")] or about
    if not about:
        return "\n  ".join(lines)
    is_unknown = "unrecognized" in message or "not accept" in message
    if is_unknown:  # another option may end in the same word
        about = [n for n in about if f"--{n}" not in options] or about
    name = max(about, key=lambda name: (name.count("."), len(name)))
    if is_unknown:
        lines.append(did_you_mean(name, options))
    elif "import" in message:
        lines.append(did_you_mean(given[name], known_class_names()) or CLASS_PATH_HINT)
    return "\n  ".join([f"--{name}={given[name]}:", *filter(None, lines)])


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """'did you mean X?' where the last part of a known word is nearly this one's, else nothing."""
    by_end = {last_part(name).lower(): name for name in known}
    near = difflib.get_close_matches(last_part(word).lower(), by_end, n=1, cutoff=0.7)
    return f"did you mean {by_end[near[0]]}?" if near else ""


def known_class_names() -> list[str]:
    """The names of all imported classes that an option may take."""
    every = list(OPTION_BASES)
    for each in every:  # grows
        every += each.__subclasses__()
    return [each.__name__ for each in every[len(OPTION_BASES) :]]


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]
