"""`--config`: where a YAML file is found, and how it is read.

A file holds options by name, or sections of them, `fit: {trainer: {max_epochs: 3}}`: a subcommand takes its own.
YAML is read strictly: what PyYAML takes in silence as something else than it says (`1:30` as 90, `010` as 8, the last
of two equal keys) stays text or is refused, and so are infinities and NaN.
"""

import math
import os
import re
from collections.abc import Hashable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import _loaders_dumpers

from lightning_mgpu.cli.subcommands import RUNS
from lightning_mgpu.runs.errors import UsageError

PACKAGE = Path(__file__).parents[1]
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of a wheel, of a checkout
CONFIGS = next((path for path in PLACES if path.is_dir()), PLACES[0])
NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}


class StrictLoader(yaml.SafeLoader):
    """Knows decimal numbers alone, and refuses a key that stands twice in one mapping."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in NUMBERS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_finite(self, node: yaml.ScalarNode) -> float:
        if not math.isfinite(value := float(node.value)):
            raise yaml.constructor.ConstructorError(None, None, f"{node.value} is too large", node.start_mark)
        return value


StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?((0|[1-9]\d*)\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|(0|[1-9]\d*)[eE][-+]?\d+)$"),
    list("-+0123456789."),
)
StrictLoader.add_constructor("tag:yaml.org,2002:float", StrictLoader.construct_finite)


def load(text: str) -> Any:
    try:
        return yaml.load(text, StrictLoader)
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error


_loaders_dumpers.yaml_default_loader = StrictLoader  # type: ignore[assignment]  # of all values, in files and on the command line


def find_config(name: str) -> Path:
    """The path of a YAML file here or in `configs/`.

    Raises:
        UsageError: If there is none.
    """
    path = Path(os.path.expanduser(name))
    path = path if path.exists() else CONFIGS / name
    if path.is_file():
        return path
    if not CONFIGS.is_dir():
        raise UsageError(f"no configurations are in {CONFIGS}: copy configs/ of the project there")
    shipped = {file.stem: str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))}
    close = get_close_matches(path.stem, shipped, n=1)
    near = f"; did you mean {shipped[close[0]]}?" if close else ""
    raise UsageError(f"--config={name}: no such file, here or in {CONFIGS}{near}")


def read_config(name: str) -> dict[str, Any]:
    """What a `--config` gives: the options in a file, or in a mapping on the command line itself.

    Raises:
        UsageError: If it cannot be read, or holds no mapping of options by name.
    """
    try:
        content = load(name if name.startswith("{") else find_config(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise UsageError(f"--config={name} cannot be read as YAML: {where}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config={name}: it needs options by name, such as 'trainer: {{max_epochs: 3}}'")
    return content


def options_for(subcommand: str, name: str) -> dict[str, Any]:
    """What a `--config` gives a subcommand: all of it, or the section of that name.

    Raises:
        UsageError: If it has sections for other subcommands alone, or options beside sections.
    """
    content = read_config(name)
    sections = [key for key in content if key in RUNS]
    if not sections:
        return content
    if len(sections) < len(content):
        raise UsageError(f"--config={name}: put all options under the subcommands' names, or none")
    if subcommand not in sections:
        raise UsageError(f"--config={name} has options of {' and '.join(sections)}, but none of {subcommand}")
    section = content[subcommand] or {}
    if not isinstance(section, dict):
        raise UsageError(f"--config={name}: {subcommand} is no mapping of options by name, but {section}")
    return section
