"""Conveniences of the command line that become plain LightningCLI arguments before anything is parsed."""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.config_file import OF_THE_SUBCOMMAND, SUBCOMMANDS, read_config, sections_of
from lightning_mgpu.errors import UsageError
from lightning_mgpu.explain import TOOLS, no_subcommand
from lightning_mgpu.flatten import flatten

PACKAGE = Path(__file__).parent
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of a wheel, of a checkout
CONFIGS = next((path for path in PLACES if path.is_dir()), PLACES[0])
STRATEGY = "--trainer.strategy"
MAX_NESTED = 200  # brackets open at once in a value; libyaml overflows the stack at some ten thousands
MAX_BRACKETS = 5000  # in all: quoted ones look as if they closed others


def check_values(args: list[str]) -> list[str]:
    """The arguments, if no value would end the YAML parser in a crash.

    Raises:
        UsageError: For a value with a YAML tag, nested beyond reason, or lost by argparse.
    """
    for arg in args:
        value = arg.partition("=")[2] if arg.startswith("--") else arg
        if value.lstrip().startswith("!!"):
            raise UsageError(f"{arg}: YAML tags are not taken")
        if _depth(value) > MAX_NESTED or value.count("[") + value.count("{") > MAX_BRACKETS:
            raise UsageError(f"{arg[:40]}...: nested too deeply")
        if value == "--":
            raise UsageError(f"{arg}: a value is missing")
    return args


def _depth(value: str) -> int:
    depth = deepest = 0
    for character in value:
        depth = max(depth + (character in "[{") - (character in "]}"), 0)
        deepest = max(deepest, depth)
    return deepest


def with_subcommand_first(args: list[str]) -> list[str]:
    """The arguments with every `--config` before the subcommand behind it, where everything else looks for it.

    A file with sections may be what names the subcommand.

    Raises:
        UsageError: If no subcommand is named, or a file is not good (see `config_file.py`).
    """
    names, rest = [], list(args)
    while rest and (rest[0].startswith("--config=") or rest[0] in ("--config", "-c")):
        arg = rest.pop(0)
        if "=" not in arg and not rest:
            raise UsageError(f"{arg}: expected one argument")
        names.append(arg.removeprefix("--config=") if "=" in arg else rest.pop(0))
    if not names or rest[:1] in (["-h"], ["--help"], ["--version"]):
        return rest
    subcommand = rest.pop(0) if rest and not rest[0].startswith("-") else _named_in(names)
    if subcommand in TOOLS:
        raise UsageError(f"{subcommand}: name it first, and what it takes behind it")
    if subcommand not in SUBCOMMANDS:
        raise UsageError(no_subcommand(subcommand, (*SUBCOMMANDS, *TOOLS)))
    return [subcommand, *(f"--config={name}" for name in names), *rest]


def _named_in(names: list[str]) -> str:
    """The one subcommand that configurations name, or have a section for."""
    contents = [_content(name) for name in names]
    asked = [str(content[OF_THE_SUBCOMMAND]) for content in contents if OF_THE_SUBCOMMAND in content]
    named = asked[-1:] or list(dict.fromkeys(key for content in contents for key in sections_of(content)))
    if len(named) != 1:
        raise UsageError(f"--config={names[0]}: name a subcommand first, one of {', '.join(named or SUBCOMMANDS)}")
    return named[0]


def with_strategy_class(args: list[str]) -> list[str]:
    """The arguments with its class after every registered name of a strategy, if options of one are given.

    `--trainer.strategy=ddp --trainer.strategy.find_unused_parameters=true`: jsonargparse takes options of classes only.
    The name may stand in a `--config` file, too.
    """
    if not any(arg.startswith(f"{STRATEGY}.") for arg in args):
        return args
    found: list[str] = []
    for before, arg in zip(["", *args], args):
        found.append(arg)
        name: Any = None
        if before in ("--config", "-c") or arg.startswith("--config="):
            name = _options_in(arg.removeprefix("--config="), args[0]).get(STRATEGY.removeprefix("--"))
        elif before == STRATEGY or arg.startswith(f"{STRATEGY}="):
            name = arg.removeprefix(f"{STRATEGY}=")
        if isinstance(name, str) and name.lower() in StrategyRegistry:
            registered = StrategyRegistry[name.lower()]
            found.append(f"{STRATEGY}={_as_argument(registered['strategy'])}")
            found += [f"{STRATEGY}.{key}={_as_argument(value)}" for key, value in registered["init_params"].items()]
    return found


def _as_argument(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)


def with_shipped_configs(args: list[str]) -> list[str]:
    """The arguments with every `--config` that names no file here, but one in `configs/`, replaced by that path.

    Raises:
        UsageError: If there is no such file, it is not good (see `config_file.py`), or has sections for others alone.
    """
    found = list(args)
    for i, arg in enumerate(args):
        if arg in ("--config", "-c") and i + 1 < len(args):
            found[i + 1] = find_config(args[i + 1])
            _check_section(args[i + 1], args[0])
        elif arg.startswith("--config="):
            found[i] = "--config=" + find_config(arg.removeprefix("--config="))
            _check_section(arg.removeprefix("--config="), args[0])
    return found


def _check_section(name: str, subcommand: str) -> None:
    if (sections := sections_of(_content(name))) and subcommand in SUBCOMMANDS and subcommand not in sections:
        raise UsageError(
            f"--config={name} has options of {' and '.join(sections)}, but none of {subcommand}: leave it out, or put "
            f"'{subcommand}: {{}}' there"
        )


def find_config(name: str) -> str:
    """The path of a YAML file here or in `configs/`."""
    if name.startswith("{"):  # a configuration itself: a checkpoint's
        return name
    path = Path(os.path.expanduser(name))
    path = path if path.exists() else CONFIGS / name
    if not path.is_file():
        check_configs()
        shipped = {file.stem: str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))}
        close = get_close_matches(path.stem, shipped, n=1)
        near = f" (did you mean {shipped[close[0]]}?)" if close else ""
        raise UsageError(f"--config={name}: no such file here{near}; those shipped are {', '.join(shipped.values())}")
    read_config(name, path)  # strictly, once before the parser does
    return str(path)


def check_configs() -> None:
    """Look whether the configurations are beside the package: a copy of it alone has none.

    Raises:
        UsageError: If they are not.
    """
    if not CONFIGS.is_dir():
        raise UsageError(f"no configurations are in {CONFIGS}: copy configs/ of the project there")


def given_options(args: list[str]) -> dict[str, Any]:
    """What options were given, by name: as flags, and in `--config` files; of two the later one counts."""
    given: dict[str, Any] = {}
    for i, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        name, has_value, value = arg.partition("=")
        if not has_value:
            value = args[i + 1] if i + 1 < len(args) else ""
        if name in ("--config", "-c"):
            given |= _options_in(value, args[0]) if value else {}
        else:
            given[name.removeprefix("--")] = value
    return given


def _options_in(name: str, subcommand: str) -> dict[str, Any]:
    """What a `--config` gives a subcommand, by name."""
    content = _content(name)
    return flatten(content.get(subcommand) or {} if sections_of(content) else content)


def _content(name: str) -> dict[str, Any]:
    config = find_config(name)
    return read_config(name, None if config.startswith("{") else Path(config))
