"""Checks a parsed configuration, before anything is built: no calls, no numbers out of range."""

import os
import pydoc
import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from inspect import isclass
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from lightning_mgpu.runs.directory import CONFIG, RUN_JSON, flatten
from lightning_mgpu.tools import RANGES, UsageError, check_range

# else `{class_path: subprocess.Popen, ...}` would start a command if a parameter has no type
set_parsing_settings(instantiate_subclass_spec_in_any=False)


def reject_code_of_runs(args: list[str], name: str, path: Any = None, target: Any = None) -> None:
    """A finder's `find_spec`: raises for modules in a run directory that no argument names."""
    spec, values = PathFinder.find_spec(name, path), [arg.rpartition("=")[2] for arg in args]
    is_named = any(f"{x}.".startswith(f"{name}.") and not os.path.exists(x) for x in values)
    if is_named or spec is None or not spec.has_location:  # a namespace package has no file
        return
    entries = {os.path.realpath(entry) for entry in sys.path}
    for folder in Path(os.path.realpath(str(spec.origin))).parents:
        if (folder / CONFIG).is_file() and (folder / RUN_JSON).is_file():
            why = "only the command line may name code in a run directory"
            raise UsageError(f"{spec.origin} does not run: {why}")
        if str(folder) in entries:
            return


def check_class_paths(config: Any, name: str = "") -> None:
    """Raise a UsageError if a `class_path` is a function: jsonargparse would call os.system."""
    if isinstance(config, list):
        config = dict(enumerate(config))
    for key, value in config.items() if isinstance(config, dict) else ():
        if key == "class_path" and not is_class(value):
            fix = "use a class, or write the path of a function as a string without init_args"
            raise UsageError(f"--{name}={value}: class_path must be a class: {fix}")
        is_part = key in ("class_path", "init_args")
        check_class_paths(value, name if is_part else f"{name}.{key}".lstrip("."))


def is_class(path: Any) -> bool:
    module, _, name = str(path).rpartition(".")
    try:  # `name` in its module, and not a submodule of the same name
        return isclass(getattr(pydoc.locate(module), name, None))
    except pydoc.ErrorDuringImport:
        return False


def check_ranges(config: dict[str, Any]) -> None:
    """Raise a UsageError for numbers out of range, even if Lightning would accept them."""
    for name, value in flatten(config).items():
        if name == "trainer.strategy.timeout" and re.match("-|0:00:00", str(value)):
            raise UsageError(f"--{name}={value}: must be a positive time, such as 0:05:00")
        if name in RANGES:
            with suppress(TypeError, ValueError):  # None, lists, words such as `auto`
                check_range(name, value)
