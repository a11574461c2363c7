"""`--config`: where a YAML file is found, how it is read, and how `config.yaml` is written."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_dumper

from lightning_mgpu.tools import PACKAGE, UsageError, program


def config_dirs() -> list[Path]:
    """The `configs/` of the project, then of this package: in a wheel inside it, else beside it."""
    packages = [Path(str(files(name))) for name in dict.fromkeys((program(), PACKAGE))]
    return [(p if (p / "configs").is_dir() else p.parent) / "configs" for p in packages]


def find_config(name: str) -> Path:
    """The path of a YAML file, here or in `config_dirs()`."""
    for path in (Path(name), *(each / name for each in config_dirs())):
        if path.is_file():
            return path
    raise UsageError(f"--config={name}: no such file, here or in {config_dirs()[0]}")


def read_default_config() -> dict[str, Any]:
    """`configs/default.yaml`: its sections in a project's file replace those in this package's."""
    config: dict[str, Any] = {}
    for path in [each / "default.yaml" for each in config_dirs()][::-1]:
        config |= read_config(str(path)) if path.is_file() else {}
    return config


def read_config(name: str) -> dict[str, Any]:
    """The options in a file, or in a mapping on the command line."""
    try:
        text = name if name.startswith("{") else find_config(name).read_text(encoding="utf-8")
        content = get_loader("yaml")(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{name} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{name}: it needs options by name, such as 'trainer: {{devices: 2}}'")
    return content


def dump_config(config: Any, in_one_line: bool = False) -> str:
    options: dict[str, Any] = {"sort_keys": False, "default_flow_style": in_one_line}
    return str(yaml.safe_dump(without_unwritten(config), allow_unicode=True, **options))


def without_unwritten(value: Any) -> Any:
    """Leave out defaults that YAML cannot express, such as a lambda: they count anyway."""
    if isinstance(value, list):
        return [without_unwritten(item) for item in value]
    if not isinstance(value, dict):
        return value
    unwritten = [name for name in value if "Unable to serialize" in str(value[name])[:24]]
    return {name: without_unwritten(value[name]) for name in value if name not in unwritten}


set_dumper("yaml", dump_config)  # for `--print_config`, too
