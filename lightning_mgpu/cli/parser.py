"""Lightning's argument parser, in which a class that is named starts from its own defaults."""

import re
from argparse import ArgumentError
from collections.abc import Iterable
from functools import partial
from itertools import dropwhile
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from lightning_mgpu.cli.error_messages import last_part
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import PACKAGE, command, program

NO_TEXT = "Unable to serialize instance "  # jsonargparse writes it for a value without a text
# StochasticWeightAveraging takes one; else config.yaml would say "Unable to serialize instance"
register_type(torch.device, str, torch.device, fail_already_registered=False)
# the default of Timer's `interval: str` is an Enum, of which jsonargparse writes no text
yaml.SafeDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(text[:]))


AMBIGUOUS = r"Multiple subclasses with name (\w+)\..* "


class Parser(LightningArgumentParser):
    """Drops the arguments of a default class if another class is named.

    `--model.optimizer=AdamW` replaces the default SGD *and* its default arguments. jsonargparse
    would keep those that both classes have, here SGD's lr. Values given in a file or by a flag are
    kept.
    """

    _named: dict[str, str] = {}  # noqa: RUF012 - the class given for each argument, in parsing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"prog": command(), **kwargs})  # of a class's help, too

    @override
    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Called for the arguments of every class."""
        # its older name
        before = args[0] if args else kwargs.get("namespace", kwargs.get("cfg_base"))
        parts = [part if isinstance(part, dict) else vars(part) for part in (before, obj) if part]
        given = {name: value for part in parts for name, value in part.items()}
        outer = self._named  # restored afterwards: calls are nested, one per class
        self._named = {
            name: value["class_path"] for name, value in given.items() if _names_class(value)
        }
        try:
            return super().parse_object(obj, *args, **kwargs)
        except ArgumentError as error:
            # of several classes with one name, a project's counts, then this package's:
            # its OneCycleLR before torch's
            for package in (program(), PACKAGE):
                if found := re.search(rf"{AMBIGUOUS}({package}\.[\w.]+\w)", str(error)):
                    named = {n: _renamed(value, *found.groups()) for n, value in parts[-1].items()}
                    return super().parse_object(named, *args, **kwargs)
            raise
        finally:
            self._named = outer

    @override
    def instantiate(self, *args: Any, **kwargs: Any) -> Namespace:
        """Called for the arguments of every class, before the class gets them."""
        values = super().instantiate(*args, **kwargs)
        for name, value in vars(values).items():
            values[name] = _plain(value)
        return values

    @override
    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        defaults = super().get_defaults(*args, **kwargs)
        for name, class_path in self._named.items():
            if _names_class(default := defaults.get(name)) and default["class_path"] != class_path:
                defaults[name] = Namespace(class_path=class_path)
        return defaults

    @override
    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> Any:
        """A logger without a `save_dir` writes to the run directory, which is filled in later."""
        added = super().add_class_arguments(theclass, *args, **kwargs)
        if isinstance(theclass, type) and issubclass(theclass, Logger) and "save_dir" in added:
            self.set_defaults(save_dir="")
        return added


def _renamed(value: Any, name: str, path: str) -> Any:
    if _names_class(value):
        return {**vars(Namespace(value)), "class_path": _renamed(value["class_path"], name, path)}
    return path if value == name else value


def _names_class(value: Any) -> bool:
    return isinstance(value, (dict, Namespace)) and "class_path" in value


def _plain(value: Any) -> Any:
    """`partial(SGD, lr=0.1)` for jsonargparse's own, which holds the whole command line.

    A copy of a model would copy that, too, and fail under `ddp`, as it holds locks.
    """
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, partial) and str(value.func.__module__).startswith("jsonargparse."):
        made, *args = dropwhile(lambda arg: not isinstance(arg, type), value.args)
        return partial(made, *args, **value.keywords)
    return value


def restorable(dumped: Any, value: Any, given: Iterable[str]) -> Any:
    """A dumped configuration that gives this one when it is read.

    jsonargparse finds no text for a text that could have been a function. A default that has none,
    such as a lambda, is left out.

    Raises:
        UsageError: If the value of an option that was given has no text.
    """
    if isinstance(dumped, list) and isinstance(value, (list, tuple)):
        return [restorable(*pair, given) for pair in zip(dumped, value)]
    if not isinstance(dumped, dict) or not isinstance(value, (dict, Namespace)):
        return dumped
    kept = {}
    for key, item in dumped.items():
        if not str(item).startswith(NO_TEXT):
            kept[key] = restorable(item, value.get(key), given)
        elif isinstance(value[key], str):
            kept[key] = value[key]
        elif name := next((name for name in given if last_part(name) == key), ""):
            told = "config.yaml cannot say which object this is; a function has a path that can"
            raise UsageError(f"--{name}={item.removeprefix(NO_TEXT)}: {told}")
    return kept
