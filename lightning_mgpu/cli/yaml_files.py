"""`--config`: where a YAML file is found, and how it is read."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import config_dirs


def find_config(name: str, option: str = "--config") -> Path:
    """The path of a YAML file here, or in the `configs/` of the project or of this package."""
    dirs = config_dirs()
    for path in (Path(name), *(each / name for each in dirs)):
        if path.is_file():
            return path
    names = [str(path.relative_to(each)) for each in dirs for path in each.rglob("*.yaml")]
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    places = " or ".join(map(str, dirs))
    raise UsageError(f"{option}={name}: no such file, here or in {places}{hint}")


def read_default_config() -> dict[str, Any]:
    """`configs/default.yaml`: its sections in a project's file replace those in this package's."""
    config: dict[str, Any] = {}
    for path in [each / "default.yaml" for each in config_dirs()][::-1]:
        config |= read_config(str(path)) if path.is_file() else {}
    return config


def read_config(name: str, option: str = "--config") -> dict[str, Any]:
    """The options in a file, or in a mapping on the command line.

    Raises:
        UsageError: If there is no such file, or it has no options; names the `option` given.
    """
    is_file = not name.startswith("{")
    try:
        text = find_config(name, option).read_text(encoding="utf-8") if is_file else name
        content = get_loader("yaml")(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{option}={name} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{option}={name}: it needs options by name, such as 'trainer: {{max_epochs: 3}}'"
        )
    return content
