"""A YAML file read strictly: what PyYAML takes in silence as something else than it says is refused.

YAML 1.1 makes 90 of `1:30` and 8 of `010`, PyYAML keeps the last of two equal keys, and a few lines of aliases can
stand for billions of values.

A file holds options by name, or sections of them, `fit: {trainer: {max_epochs: 3}}`, of which a subcommand takes its
own.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from lightning_mgpu.errors import UsageError

SUBCOMMANDS = ("fit", "validate", "test", "predict")
OF_THE_SUBCOMMAND = "subcommand"  # a key beside the sections, which names one: as jsonargparse has it
MAX_VALUES = 100_000  # of a file with its aliases written out
OTHER_NUMBER = ("!other-number", re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)$"))


class _StrictLoader(yaml.SafeLoader):
    """Refuses numbers of base 8 and 60, and a key that stands twice in one mapping; dates are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own
        first: [OTHER_NUMBER, *(pair for pair in resolvers if not pair[0].endswith(":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def refuse_number(self, node: yaml.ScalarNode) -> None:
        problem = f"{node.value} would be read as a number of base 8 or 60: write it in digits, or in quotes"
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


_StrictLoader.add_constructor(OTHER_NUMBER[0], _StrictLoader.refuse_number)


def read_config(name: str, path: Path | None = None) -> dict[str, Any]:
    """What a `--config` gives: a file or, without a path, a mapping on the command line itself.

    Raises:
        UsageError: If it cannot be read, holds no mapping of options by name, or both options and sections, gives one
            twice, or grows without end.
    """
    try:
        content = yaml.load(name if path is None else path.read_text(encoding="utf-8"), _StrictLoader)
    except RecursionError as error:
        raise UsageError(f"--config={name} cannot be read as YAML: it is nested too deeply") from error
    except Exception as error:  # PyYAML's constructors leave ValueError, AttributeError, ... to a tag that does not fit
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else error
        raise UsageError(f"--config={name} cannot be read as YAML: {where}") from error
    if not isinstance(content, dict):
        holds = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise UsageError(f"--config={name} {holds}: it needs options by name, such as 'trainer: {{max_epochs: 3}}'")
    if _num_values(content, {}) > MAX_VALUES:
        raise UsageError(f"--config={name} holds more than {MAX_VALUES} values: an alias repeats or contains itself")
    if sections := sections_of(content):
        if others := [str(key) for key in content if key not in (*sections, OF_THE_SUBCOMMAND)]:
            raise UsageError(
                f"--config={name} holds options of {' and '.join(sections)}, and {', '.join(others)}: put all under "
                "the subcommands' names, or none"
            )
        for key in sections:
            if not isinstance(content[key], dict | None):
                raise UsageError(f"--config={name}: {key} is no mapping of options by name, but {content[key]}")
    elif OF_THE_SUBCOMMAND in content:
        raise UsageError(f"--config={name} names a subcommand, but has no section for any: give it on the command line")
    return content


def sections_of(content: dict[str, Any]) -> list[str]:
    """The subcommands that a configuration has sections for; none if it holds options alone."""
    return [key for key in content if key in SUBCOMMANDS]


def section(text: str, subcommand: str) -> str:
    """What a configuration has for a subcommand, as YAML again; the text itself where it holds options alone."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)  # `<<`
    except yaml.YAMLError:  # the parser tells
        return text
    items = node.value if isinstance(node, yaml.MappingNode) else []
    parts = {key.value: value for key, value in items if isinstance(key, yaml.ScalarNode)}
    if not sections_of(parts):
        return text
    found = parts.get(subcommand)
    is_empty = not isinstance(found, yaml.MappingNode)  # `fit:`, with nothing behind it
    return "{}" if is_empty else yaml.serialize(found, Dumper=yaml.SafeDumper, allow_unicode=True)


def misread(text: str) -> str | None:
    """What of a value, a list or mapping on the command line, YAML would take for something else; None if nothing."""
    try:
        yaml.load(text, _StrictLoader)
    except yaml.constructor.ConstructorError as error:
        return str(error.problem)
    except Exception:  # no YAML: the parser has told, or taken it for text
        return None
    return None


def _num_values(value: Any, known: dict[int, int]) -> int:
    """How many values there are with all aliases written out; more than allowed for one that contains itself."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_VALUES + 1  # until it is counted: whoever meets it before is inside it
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_num_values(part, known) for part in parts)
    return known[id(value)]
