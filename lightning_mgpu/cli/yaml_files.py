"""`--config`: where a YAML file is found, how it is read, and how `config.yaml` is written."""

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
    """`configs/default.yaml`: the keys of a project's sections replace those in this package's."""
    config: dict[str, Any] = {}
    for path in [each / "default.yaml" for each in config_dirs()][::-1]:
        for key, value in read_config(str(path)).items() if path.is_file() else ():
            is_section = isinstance(value, dict) and "class_path" not in value
            config[key] = {**(config.get(key) or {}), **value} if is_section else value
    return config


def read_config(name: str) -> dict[str, Any]:
    """The options in a file, or in a mapping on the command line; null is as left out."""
    try:
        text = name if name.startswith("{") else find_config(name).read_text(encoding="utf-8")
        content = load_yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{name} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{name}: it needs options by name, such as 'trainer: {{devices: 2}}'")
    return {key: value for key, value in content.items() if value is not None}


def read_run_config(path: Path) -> dict[str, Any]:
    """The `config.yaml` of a run, which has a class for model and data."""
    config = read_config(str(path))
    for key in ("model", "data"):
        if not isinstance(config.get(key), dict) or "class_path" not in config[key]:
            raise UsageError(f"{path} has no class_path of {key}: it is cut short, or of no run")
    return config


def load_yaml(text: str) -> Any:
    """Read YAML as jsonargparse does, which drops the first of two equal keys without a word.

    Raises:
        YAMLError: Also for a key given twice, and for aliases that multiply or hold themselves.
    """
    nodes, num_values = [yaml.compose(text, Loader=LOADER)], 0
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} has a NUL in a text")
        values = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            refuse_twice(node)
            values = [value for _, value in node.value]
        nodes += values
        num_values += len(values)  # an alias counts wherever it stands
        if num_values > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES} values: do aliases hold each other?")
    return plain_load(text)


def refuse_twice(mapping: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            reason = f"in line {lines[name]} and in line {line}: keep one"
            raise yaml.YAMLError(f"{key.value} is given twice, {reason}")
        lines[name] = line


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


set_loader("yaml", load_yaml, (yaml.YAMLError,))  # for values on the command line, too
set_dumper("yaml", dump_config)  # for `--print_config`, too
