"""Refuses calls and wrong numbers in a parsed configuration, before anything is built."""

import pydoc
from contextlib import suppress
from inspect import isclass
from typing import Any

from jsonargparse import set_parsing_settings

from lightning_mgpu.runs.directory import flatten
from lightning_mgpu.tools import RANGES, UsageError, check_range

# else `{class_path: subprocess.Popen, ...}` would start a command where a parameter has no type
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def refuse_functions(config: Any, name: str = "") -> None:
    """Refuse a `class_path` that is not a class: jsonargparse would call os.system, too.

    Raises:
        UsageError: With the option's dotted name and the path.
    """
    if isinstance(config, list):
        config = dict(enumerate(config))
    for key, value in config.items() if isinstance(config, dict) else ():
        if key == "class_path" and not is_class(value):
            fix = "name a class; a function goes by its path alone, as text, without init_args"
            raise UsageError(f"--{name}={value}: a class_path that is not a class: {fix}")
        is_part = key in ("class_path", "init_args")
        refuse_functions(value, name if is_part else f"{name}.{key}".lstrip("."))


def is_class(path: Any) -> bool:
    module, _, name = str(path).rpartition(".")
    try:  # `name` in its module, and not a submodule of the same name
        return isclass(getattr(pydoc.locate(module), name, None))
    except pydoc.ErrorDuringImport:
        return False


def refuse_numbers(config: dict[str, Any]) -> None:
    """Refuse numbers out of their option's range, also where Lightning would take them."""
    for name, value in flatten(config).items():
        if name in RANGES:
            with suppress(TypeError, ValueError):  # None, lists, words such as `auto`
                check_range(name, value)
