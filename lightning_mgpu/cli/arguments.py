"""Conveniences of the command line become plain arguments of the LightningCLI before parsing.

What comes out: the defaults first, then what was given, in its order; what stands later wins.
"""

import pydoc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.cli.error_messages import did_you_mean, last_part
from lightning_mgpu.cli.yaml_files import CONFIGS, find_config, read_config
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import to_yaml
from lightning_mgpu.runs.checkpoint_file import flatten
from lightning_mgpu.runs.resume import FLAG, find_run
from lightning_mgpu.strategies.names import strategy_config

STRATEGY = "--trainer.strategy"
COMMON = ("auto", "ddp", "dp", "fsdp", "manual_allreduce")


def join(args: Sequence[str]) -> list[str]:
    """The arguments, option and value in one, `~` as in a shell, a `--config` by its path.

    `--model=model.yaml` becomes what is in the file: a class and its arguments.
    """
    joined: list[str] = []
    for arg in args:
        before = joined[-1] if joined else ""
        if before.startswith("-") and "=" not in before and not arg.startswith(("--", "-c")):
            joined[-1] = f"{before}={arg}"
        else:
            joined.append(arg)
    joined = [arg.replace("=~/", f"={Path.home()}/", 1) for arg in joined]
    return [_found(arg) for arg in joined]


def _found(arg: str) -> str:
    name, _, value = arg.partition("=")
    if name in ("--model", "--data") and value.endswith((".yaml", ".yml")):
        return f"{name}={to_yaml(read_config(value), in_a_line=True)}"
    if name not in ("-c", "--config") or value.startswith("{"):
        return arg
    return f"--config={find_config(value)}"


def given_options(args: Sequence[str]) -> dict[str, Any]:
    """What options were given, as flags and in files, under their names on the command line."""
    given: dict[str, Any] = {}
    for arg in args:
        name, _, text = arg.removeprefix("--").partition("=")
        value: Any = text
        if name == "config":
            given |= flatten(read_config(text))
        elif arg.startswith("--"):
            with suppress(UsageError):  # other texts begin with a brace, too: {epoch}-{val_loss}
                value = read_config(text) if text.startswith("{") else text
            given |= flatten({name.rstrip("+"): value})
    return given


def take_resume(args: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--resume`, and the directory of the run it names."""
    named = [arg for arg in args if arg.partition("=")[0] == FLAG]
    others = [arg for arg in args if arg not in named]
    return others, find_run(named[-1].partition("=")[2]) if named else None


def prepare(args: list[str], given: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """The arguments behind a subcommand in the LightningCLI's form, `first` before them."""
    known = {**flatten(first), **given}
    before = f"--config={to_yaml(first, in_a_line=True)}"
    return [_help(arg, known) for arg in (before, *_strategy(args, given))]


def with_defaults(given: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """`configs/default.yaml`, over it a checkpoint's configuration; a class named has its defaults.

    As a `default_config_files` of the parser, the file would give LeNet's settings to all models.
    """
    defaults = read_config(str(CONFIGS / "default.yaml")) | saved
    for key in ("model", "data"):
        named = given.get(key)
        if isinstance(named, str) and last_part(named) != last_part(defaults[key]["class_path"]):
            defaults[key] = {"class_path": named}
    return defaults


def _strategy(args: list[str], given: dict[str, Any]) -> list[str]:
    """The arguments with a strategy's class for its name where the class or options are given.

    jsonargparse takes `--trainer.strategy=ddp` for a text, and a text has no options.
    """
    name = given.get(STRATEGY.removeprefix("--"))
    options = [arg for arg in args if arg.startswith(f"{STRATEGY}.")]
    registered = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(name, str) or (name in registered and not options):
        return args
    if name not in registered and not isinstance(pydoc.locate(name), type):
        raise UsageError(
            f"{STRATEGY}={name}: no such strategy. {did_you_mean(name, registered)}\n"
            "a class of your own is given by its path: my_package.MyStrategy\n"
            f"registered are {', '.join(sorted(registered, key=_rarity))}"
        )
    others = [arg for arg in args if arg.partition("=")[0] != STRATEGY and arg not in options]
    return [*others, f"{STRATEGY}={to_yaml(strategy_config(name), in_a_line=True)}", *options]


def _rarity(name: str) -> tuple[bool, bool, str]:
    """Sorts strategies' names: the common ones first, Lightning's many variants last."""
    return name not in COMMON, not name.startswith("manual_allreduce_"), name


def _help(arg: str, known: dict[str, Any]) -> str:
    """`--help.all` is the parser's help; `--model.help` alone shows the class that would run."""
    name, _, value = arg.partition("=")
    if arg == "--help.all":
        return "--help"
    if name in ("--model.help", "--data.help") and not value:
        return f"{name}={known[name[2:].removesuffix('.help')]}"
    if name == f"{STRATEGY}.help":
        return f"{name}={strategy_config(value or 'manual_allreduce')['class_path']}"
    return arg
