"""Lightning's argument parser, in which a class named on the command line starts from its own defaults."""

import re
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, dict_to_namespace
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_mgpu.config_file import section
from lightning_mgpu.explain import SEVERAL_CLASSES

# StochasticWeightAveraging takes one; jsonargparse would write "Unable to serialize instance" to config.yaml
register_type(torch.device, str, torch.device, fail_already_registered=False)


class HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the examples' lines."""


class Parser(LightningArgumentParser):
    """Drops the arguments of a default class where another class is named.

    jsonargparse keeps those whose names both classes have: LeNet's learning rate for ResNet-18, and its SGD's
    `weight_decay: 0` for an AdamW. What a file or a flag says is kept so, too: it was said.
    """

    subcommand: str = ""  # whose arguments these are
    _named: dict[str, str] = {}  # noqa: RUF012 - the class given for each argument, while they are parsed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"prog": "python -m lightning_mgpu", **kwargs})  # else __main__.py in `--model.help`

    @override
    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Called for every `--config`: of one with sections it takes the subcommand's own."""
        return super().parse_string(section(content, self.subcommand) if self.subcommand else content, *args, **kwargs)

    @override
    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Called for the arguments of every class."""
        before = args[0] if args else kwargs.get("namespace", kwargs.get("cfg_base"))  # its older name
        given = {name: value for part in (before, obj) if part for name, value in _as_dict(part).items()}
        outer = self._named  # of the same class, around this one
        self._named = {name: value["class_path"] for name, value in given.items() if _names_class(value)}
        try:
            return super().parse_object(obj, *args, **kwargs)
        except Exception as error:
            if (torchs := _as_torchs(obj, str(error))) is None:
                raise
            return super().parse_object(torchs, *args, **kwargs)
        finally:
            self._named = outer

    @override
    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """The defaults, less what the classes of the `default_config_files` have as their own."""
        defaults = super().get_defaults(*args, **kwargs)
        for file in self.default_config_files:
            for name, value in (yaml.safe_load(Path(file).read_text()) or {}).items():
                if _names_class(value):
                    defaults[name] = dict_to_namespace(value)
        for name, class_path in self._named.items():
            if _names_class(default := defaults.get(name)) and default["class_path"] != class_path:
                defaults[name] = Namespace(class_path=class_path)
        return defaults


def _as_dict(config: Any) -> dict[str, Any]:
    return config if isinstance(config, dict) else vars(config)


def _as_torchs(config: Any, message: str) -> dict[str, Any] | None:
    """The arguments with torch's class of a name that two classes have: `ReduceLROnPlateau` is Lightning's, too."""
    found = re.search(SEVERAL_CLASSES, message)
    paths = [path for path in found[1].split(", ") if path.startswith("torch.")] if found else []
    if len(paths) != 1:
        return None
    name = paths[0].rpartition(".")[2]
    changed = dict(_as_dict(config))
    for key, value in changed.items():
        if value == name:
            changed[key] = paths[0]
        elif _names_class(value) and value["class_path"] == name:
            changed[key] = {**_as_dict(value), "class_path": paths[0]}
    return changed if changed != _as_dict(config) else None


def _names_class(value: Any) -> bool:
    return isinstance(value, (dict, Namespace)) and "class_path" in value
