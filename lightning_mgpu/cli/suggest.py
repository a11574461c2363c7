"""What a parser's message speaks of, and 'did you mean'."""

import difflib
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
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
}
MOST_NAMES = 8


def explain(message: str, given: dict[str, Any], options: list[str]) -> str:
    """What was given, what a parser's message says of it, and what was probably meant.

    Args:
        given: What was given, flags and files, by name, with the classes that would run.
        options: Those of the parser, without dashes.
    """
    quoted = message.replace('"', "'")
    spoken_of = [name for name in given if f"'{name}'" in quoted or f"'{last_part(name)}'" in quoted]
    first = max(spoken_of, key=lambda name: (name.count("."), len(name)), default=None)
    hints = []
    options = [*options, *class_options(given)]
    for name, value in given.items():
        kind = KINDS.get(last_part(name))
        if name not in options and (name in spoken_of or f"--{name}" in message):
            hints.append(f"--{name}: {did_you_mean(name, options, '--')}")
        elif kind and str(value) in message and last_part(value) not in (names := class_names(kind)):
            known = ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
            hints.append(f"{did_you_mean(value, names)} Take one of {known}, or a path: my_package.MyClass")
    lines = [f"--{first}={given[first]}:"] if first else []
    lines += without_noise(message) or [message]
    return "\n  ".join([*list(dict.fromkeys(lines))[: 6 - len(hints[:2])], *hints[:2]])


def last_part(value: Any) -> str:
    return str(value).rpartition(".")[2]


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean X?' where a known word, or its last part, is nearly this one."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    ends = {name.rpartition(".")[2].lower(): name for name in sorted(known, key=len, reverse=True)}
    near = difflib.get_close_matches(word.rpartition(".")[2].lower(), ends, n=1)
    if near and (not close or word.rpartition(".")[2] in ends):  # `lr`, `Adm`, `devcies`
        close = [ends[near[0]]]
    return f"did you mean {prefix}{close[0]}?" if close else "unknown."


def subclasses(base: type) -> list[type]:
    """All imported subclasses of a class, and the class itself."""
    found = [base]
    for each in found:  # grows
        found += each.__subclasses__()
    return found


def class_names(base: type) -> list[str]:
    """The names of a class's public, imported subclasses that can be given by name, this package's first."""
    found = set()
    for each in subclasses(base)[1:]:
        abstract = getattr(each, "__abstractmethods__", None) or "<locals>" in each.__qualname__
        if not abstract and not each.__name__.startswith("_"):
            found.add((not each.__module__.startswith("lightning_mgpu"), each.__name__))
    return [name for _, name in sorted(found)]


def class_options(given: dict[str, Any]) -> list[str]:
    """The options of the classes that would run, such as `model.optimizer.lr`."""
    found = []
    for key, default in (("model", ""), ("data", ""), ("model.optimizer", "SGD")):
        name = last_part(given.get(key, default))
        named = next((each for each in subclasses(KINDS[last_part(key)]) if each.__name__ == name), None)
        if named is not None:
            parser = ArgumentParser()
            parser.add_class_arguments(named, key, fail_untyped=False, skip={"params"} if "optim" in key else None)
            found += [option.lstrip("-") for option in parser._option_string_actions]
    return found
