"""jsonargparse's messages without their noise, and 'did you mean'."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

NOISE = (  # how the lines begin that tell of jsonargparse's inner life
    *("Does not validate against any", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value type:"),
    *("Expected a path but", "Given value: Namespace(", "Given value: NestedArg("),
)
KINDS: dict[str, type] = {  # what the last part of an option takes a class of
    "model": LightningModule,
    "data": LightningDataModule,
    "optimizer": Optimizer,
    "lr_scheduler": LRScheduler,
    "callbacks": Callback,
    "logger": Logger,
    "strategy": Strategy,
}
MOST_NAMES = 8
MOST_HINTS = 2


def explain(message: str, args: Sequence[str], options: Iterable[str], given: dict[str, Any]) -> str:
    """What a parser's message says, and what was probably meant.

    Args:
        message: As jsonargparse or argparse wrote it.
        args: The arguments, each with its value.
        options: Those of the parser, without dashes.
        given: What was given, flags and files, with the classes that would run.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith(NOISE)]
    return "\n  ".join([*lines[: 6 - MOST_HINTS], *hints(message, args, [*options, *class_options(given)])])


def hints(message: str, args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Lines with 'did you mean' for options and classes that are not known; of those the message speaks of, if any."""
    found: dict[str, str] = {}
    for arg in args:
        name, _, value = arg.removeprefix("--").partition("=")
        kind = KINDS.get(name.rstrip("+").rpartition(".")[2])
        if arg.startswith("--") and name.rstrip("+") not in options:
            found[name.rpartition(".")[2]] = f"--{name}: {did_you_mean(name, options, '--')}"
        elif kind and value and value.rpartition(".")[2] not in (names := class_names(kind)):
            known = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
            near = did_you_mean(value.rpartition(".")[2], names)
            found[value] = f"--{name}={value}: {near} Take one of {known}, or a path: my_package.MyClass"
    of_message = [hint for word, hint in found.items() if word in message]
    return (of_message or list(found.values()))[:MOST_HINTS]


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean X?' where a known word is, or ends in, nearly this one."""
    known = list(known)
    last = word.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == last]
    close = close or difflib.get_close_matches(word, known, n=1)
    if not close:  # `Adm`, `devcies`: compare last parts
        ends = {name.rpartition(".")[2].lower(): name for name in known}
        close = [ends[end] for end in difflib.get_close_matches(last.lower(), ends, n=1)]
    return f"did you mean {prefix}{min(close, key=len)}?" if close else "unknown."


def class_names(base: type) -> list[str]:
    """The names of a class's public, imported subclasses that can be given by name."""
    found, queue = set(), [base]
    for known in queue:  # grows
        queue += known.__subclasses__()
    for each in queue[1:]:
        abstract = getattr(each, "__abstractmethods__", None) or "<locals>" in each.__qualname__
        if not abstract and not each.__name__.startswith("_"):
            found.add((not each.__module__.startswith("lightning_mgpu"), each.__name__))
    return [name for _, name in sorted(found)]  # ours first


def class_options(given: dict[str, Any]) -> list[str]:
    """The options of the classes that would run, such as `model.optimizer.lr`."""
    found = []
    for key, default in (("model", None), ("data", None), ("model.optimizer", "torch.optim.SGD")):
        name = str(given.get(key, default) or "")
        classes = [KINDS[key.rpartition(".")[2]]]
        for known in classes:  # grows
            classes += known.__subclasses__()
        named = next((each for each in classes if each.__name__ == name.rpartition(".")[2]), None)
        if named is not None:
            parser = ArgumentParser()
            parser.add_class_arguments(named, key, fail_untyped=False, skip={"params"} if "optim" in key else None)
            found += [option.lstrip("-") for option in parser._option_string_actions]
    return found
