"""What a parser's message speaks of, and 'did you mean'."""

import difflib
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KINDS: dict[str, type] = {  # what the last part of an option takes a class of
    "model": LightningModule,
    "data": LightningDataModule,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "callbacks": Callback,
    "logger": Logger,
}
MOST_NAMES = 8
NOISE = (  # how the lines begin that tell of jsonargparse's inner life, or of what stands in the first line already
    *("Does not validate against any", "Subtypes:", "Errors:", "Parser key ", "Problem with given class_path"),
    *("Expected a <class 'NoneType'>", "Expected a <class 'str'>", "Expected a path but", "Not a valid subclass of "),
    *("Given value", "Subclass types expect one of", "a class path (str)", "a dict with"),
)
BEFORE, AFTER = "callable class: ", " Got value: Namespace("  # around what a long line says


def explain(message: str, given: dict[str, Any], options: list[str]) -> str:
    """What was given, by name, what a parser's message says of it, and which of all options was probably meant."""
    quoted = message.replace('"', "'")
    about = [n for n in given if f"--{n}" in message or f"'{n}'" in quoted or f"'{last_part(n)}'" in quoted]
    lines = without_noise(message) or [message]
    if not about:
        return "\n  ".join(lines[:6])
    name = max(about, key=lambda name: (name.count("."), len(name)))
    value, hints = given[name], []
    if name not in options and any(words in message for words in ("unrecognized", "not accept")):
        hints = [did_you_mean(name, options, "--")]
    elif (kind := KINDS.get(last_part(name))) and last_part(value) not in (names := class_names(kind)):
        known = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
        hints = [f"{did_you_mean(value, names)} Take one of {known}, or a path: my_package.MyClass"]
    return "\n  ".join([f"--{name}={value}:", *lines[:4], *hints])


def without_noise(message: str) -> list[str]:
    """The lines of jsonargparse's message that say what is wrong."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    return [line.rpartition(BEFORE)[2].partition(AFTER)[0] for line in lines if line and not line.startswith(NOISE)]


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]


def did_you_mean(word: Any, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean X?' where a known word, or its last part, is nearly this one."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    ends = {last_part(name).lower(): name for name in sorted(known, key=len, reverse=True)}
    near = difflib.get_close_matches(last_part(word).lower(), ends, n=1)
    if near and (not close or last_part(word) in ends):  # `lr`, `Adm`, `devcies`
        close = [ends[near[0]]]
    return f"did you mean {prefix}{close[0]}?" if close else "unknown."


def class_names(base: type) -> list[str]:
    """The names of a class's public, imported subclasses that can be given by name, this package's first."""
    every = [base]
    for each in every:  # grows
        every += each.__subclasses__()
    public = [c for c in every[1:] if not (c.__name__.startswith("_") or "<locals>" in c.__qualname__)]
    found = {(not c.__module__.startswith("lightning_mgpu"), c.__name__) for c in public}
    return [name for _, name in sorted(found)]
