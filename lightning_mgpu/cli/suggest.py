"""What a parser's message speaks of, and 'did you mean'."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_mgpu.cli.errors import without_noise

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


def explain(message: str, given: dict[str, Any], options: Iterable[str]) -> str:
    """What was given, what a parser's message says of it, and what was probably meant.

    Args:
        message: As jsonargparse or argparse wrote it.
        given: What was given, flags and files, by name, with the classes that would run.
        options: Those of the parser, without dashes.
    """
    spoken_of = [name for name in given if _quotes(message, name)]
    first = max(spoken_of, key=lambda name: (name.count("."), len(name)), default=None)
    lines = without_noise(message)
    lines = [f"--{first}={given[first]}:", *lines] if first else lines or [message]
    more = hints(message, given, [*options, *class_options(given)])[:MOST_HINTS]
    return "\n  ".join([*list(dict.fromkeys(lines))[: 6 - len(more)], *more])


def hints(message: str, given: dict[str, Any], options: Sequence[str]) -> list[str]:
    """Lines with 'did you mean' for the options and classes that a message speaks of and nobody knows."""
    found = []
    for name, value in given.items():
        kind = KINDS.get(name.rpartition(".")[2])
        if name not in options and (_quotes(message, name) or f"--{name}" in message):
            found.append(f"--{name}: {did_you_mean(name, options, '--')}")
        elif kind and isinstance(value, str) and value in message:
            names = class_names(kind)
            if value.rpartition(".")[2] not in names:
                known = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
                found.append(f"{did_you_mean(value, names)} Take one of {known}, or a path: my_package.MyClass")
    return found


def _quotes(message: str, name: str) -> bool:
    """Whether a message has the option, or the last part of its name, in quotes."""
    return any(f"{quote}{part}{quote}" in message for part in (name, name.rpartition(".")[2]) for quote in "\"'")


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
