"""`--config`: where a YAML file is found, and how it is read."""

import os
from collections.abc import Hashable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader

from lightning_mgpu.runs.errors import UsageError

PACKAGE = Path(__file__).parents[1]
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of a wheel, of a checkout
CONFIGS = next((path for path in PLACES if path.is_dir()), PLACES[0])


class Loader(get_yaml_default_loader()):  # type: ignore[misc]
    """jsonargparse's, which refuses a key that stands twice in one mapping: the first would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def find_config(name: str) -> Path:
    """The path of a YAML file here or in `configs/`."""
    path = Path(os.path.expanduser(name))
    path = path if path.exists() else CONFIGS / name
    if path.is_file():
        return path
    shipped = {file.stem: str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml")}
    near = [f"; did you mean {shipped[stem]}?" for stem in get_close_matches(path.stem, shipped, n=1)]
    raise UsageError(f"--config={name}: no such file, here or in {CONFIGS}{''.join(near)}")


def read_config(name: str) -> dict[str, Any]:
    """What a `--config` gives: the options in a file, or in a mapping on the command line itself."""
    try:
        content = yaml.load(name if name.startswith("{") else find_config(name).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise UsageError(f"--config={name} cannot be read as YAML: {where}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config={name}: it needs options by name, such as 'trainer: {{max_epochs: 3}}'")
    return content
