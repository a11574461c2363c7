"""Finds and reads the YAML files of `--config`, and writes `config.yaml`."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_dumper, set_loader

from lightning_mgpu.tools import PACKAGE, UsageError, program

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, if PyYAML was built with it
MAX_VALUES = 100_000  # a recipe has a hundred
plain_load = get_loader("yaml")


def config_dirs() -> list[Path]:
    """`configs/` of the project, then of this package: inside it in a wheel, else next to it."""
    packages = [Path(str(files(name))) for name in dict.fromkeys((program(), PACKAGE))]
    return [(p if (p / "configs").is_dir() else p.parent) / "configs" for p in packages]


def find_config(name: str) -> Path:
    """The path of a YAML file in the working directory or in `config_dirs()`."""
    for path in (Path(name), *(directory / name for directory in config_dirs())):
        if path.is_file():
            return path
    raise UsageError(f"--config={name}: no such file in . or {config_dirs()[0]}")


def read_default_config() -> dict[str, Any]:
    """`configs/default.yaml`: sections of a project's file are merged over this package's."""
    config: dict[str, Any] = {}
    for path in [directory / "default.yaml" for directory in config_dirs()][::-1]:
        for key, value in read_config(str(path)).items() if path.is_file() else ():
            is_section = isinstance(value, dict) and "class_path" not in value
            config[key] = {**(config.get(key) or {}), **value} if is_section else value
    return config


def read_config(name: str) -> dict[str, Any]:
    """The options in a file, or in a mapping on the command line, without null values."""
    try:
        text = name if name.startswith("{") else find_config(name).read_text(encoding="utf-8")
        content = load_yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{name} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{name}: must be a mapping of options, such as 'trainer: {{devices: 2}}'")
    return {key: value for key, value in content.items() if value is not None}


def read_run_config(path: Path) -> dict[str, Any]:
    """The `config.yaml` of a run, which must contain classes of model and data."""
    config = read_config(str(path))
    for key in ("model", "data"):
        if not isinstance(config.get(key), dict) or "class_path" not in config[key]:
            raise UsageError(f"{path} contains no {key}.class_path: truncated, or not of a run")
    return config


def load_yaml(text: str) -> Any:
    """Read YAML like jsonargparse, which silently drops the first of two equal keys.

    Raises:
        YAMLError: Also for duplicate keys, and for aliases that are recursive or multiply.
    """
    nodes, num_values = [yaml.compose(text, Loader=LOADER)], 0
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} contains a NUL character")
        values = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            check_unique_keys(node)
            values = [value for _, value in node.value]
        nodes += values
        num_values += len(values)  # aliases count at every use
        if num_values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES} values: are aliases recursive?")
    return plain_load(text)


def check_unique_keys(mapping: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            places = f"lines {lines[name]} and {line}: remove one"
            raise yaml.YAMLError(f"duplicate key {key.value} in {places}")
        lines[name] = line


def dump_config(config: Any, in_one_line: bool = False) -> str:
    options: dict[str, Any] = {"sort_keys": False, "default_flow_style": in_one_line}
    return str(yaml.safe_dump(without_unwritten(config), allow_unicode=True, **options))


def without_unwritten(value: Any) -> Any:
    """Omit defaults that YAML cannot express, such as a lambda; they apply anyway."""
    if isinstance(value, list):
        return [without_unwritten(item) for item in value]
    if not isinstance(value, dict):
        return value
    unwritten = [name for name in value if "Unable to serialize" in str(value[name])[:24]]
    return {name: without_unwritten(value[name]) for name in value if name not in unwritten}


set_loader("yaml", load_yaml, (yaml.YAMLError,))  # also for values on the command line
set_dumper("yaml", dump_config)  # also for `--print_config`
