"""Conveniences of the command line that become plain arguments of the LightningCLI before anything is parsed.

What comes out: the defaults first, then what was given, in its order; what stands later wins.
"""

import json
import os
import pydoc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mgpu.cli.suggest import class_names, did_you_mean, last_part
from lightning_mgpu.cli.yaml_files import CONFIGS, find_config, read_config
from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.flatten import flatten
from lightning_mgpu.runs.resume import FLAG, check_given, find_run

HAVE_NO_VALUE = ("-h", "--help", "--help.all", "--print_config", "--traceback", "--no-wandb")
STRATEGY = "--trainer.strategy"


def join(args: Sequence[str]) -> list[str]:
    """The arguments with every option and its value in one, and a `--config` with the path that it is found under."""
    joined: list[str] = []
    for arg in args:
        arg = f"--config{arg[2:]}" if arg == "-c" or arg.startswith("-c=") else arg
        before = joined[-1] if joined else ""
        waits = before.startswith("--") and "=" not in before and before not in HAVE_NO_VALUE
        if waits and not arg.startswith("--"):
            joined[-1] = f"{before}={arg}"
        else:
            joined.append(arg)
    return [_found(arg) for arg in joined]


def given_options(args: Sequence[str]) -> dict[str, Any]:
    """What options were given, as flags and in files, under their names on the command line."""
    given: dict[str, Any] = {}
    for arg in args:
        name, _, value = arg.removeprefix("--").partition("=")
        if name == "config":
            given |= flatten(read_config(value))
        elif arg.startswith("--"):
            given |= flatten({name: read_config(value) if value.startswith("{") else value})
    return given


def take_resume(subcommand: str, args: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--resume`, and the directory of the run it names."""
    named = [arg.partition("=")[2] for arg in args if arg.partition("=")[0] == FLAG]
    others = [arg for arg in args if arg.partition("=")[0] != FLAG]
    if not named:
        return others, None
    if subcommand != "fit":
        raise UsageError(f"{FLAG} goes on with training: python -m lightning_mgpu fit {FLAG}=RUN_DIR")
    run_dir = find_run(named[-1])
    check_given(run_dir, given_options(others))
    return others, run_dir


def prepare(subcommand: str, args: list[str], run_dir: Path | None) -> list[str]:
    """The arguments behind a subcommand in the form that the LightningCLI takes, with those of a resumed run first."""
    given = given_options(args)
    if run_dir is not None:
        first = f"--config={run_dir / 'config.yaml'}"
    else:
        defaults = _defaults(subcommand, given)
        first = f"--config={json.dumps(defaults)}"
        given = {**flatten(defaults), **given}
    return [_help(arg, given) for arg in (first, *_strategy(args, given))]


def _found(arg: str) -> str:
    name = arg.removeprefix("--config=")
    return arg if name == arg or name.startswith("{") else f"--config={find_config(name)}"


def _defaults(subcommand: str, given: dict[str, Any]) -> dict[str, Any]:
    """`configs/default.yaml`, over it a given checkpoint's configuration; a class that is named has its own defaults.

    As a `default_config_files` of the parser, the file would give LeNet's settings to every other model.
    """
    defaults = read_config(str(CONFIGS / "default.yaml"))
    path = os.path.expanduser(str(given.get("ckpt_path") or ""))
    if Path(path).suffix == ".ckpt":  # Lightning's words, `last` and `hpc`, are none
        defaults |= _of_checkpoint(path, subcommand, given)
    for key in ("model", "data"):
        named = given.get(key)
        if isinstance(named, str) and last_part(named) != last_part(defaults[key]["class_path"]):
            defaults[key] = {"class_path": named}
    return defaults


def _of_checkpoint(path: str, subcommand: str, given: dict[str, Any]) -> dict[str, Any]:
    """The configuration in a checkpoint; no option may name another model, or change one that trains on."""
    saved = saved_config(read_checkpoint(path, to_train_on=subcommand == "fit"))
    before = flatten({"model": saved.get("model", {})})
    stays = [key for key in before if key in given and (key == "model" or subcommand == "fit")]
    for key in stays:
        is_same = str(given[key]) == str(before[key])
        if isinstance(before[key], str):  # `SGD` is `torch.optim.SGD`
            is_same = last_part(given[key]) == last_part(before[key])
        if not is_same:
            raise UsageError(
                f"--{key}={given[key]}: {path} has {before[key]}, and a checkpoint's model stays: leave it out"
            )
    return saved


def _strategy(args: list[str], given: dict[str, Any]) -> list[str]:
    """The arguments with a strategy's class for its name, where options of the class are given, or the class itself.

    jsonargparse takes `--trainer.strategy=ddp` for a text, and a text has no options.
    """
    name = given.get(STRATEGY.removeprefix("--"))
    options = [arg for arg in args if arg.startswith(f"{STRATEGY}.")]
    registered = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(name, str) or (not options and name.lower() in registered):
        return args
    names = class_names(Strategy)
    if name.lower() not in registered and name not in names and not isinstance(pydoc.locate(name), type):
        shown = [known for known in registered if not ("find_unused" in known or "stage_" in known)]  # variants
        raise UsageError(
            f"{STRATEGY}={name}: no such strategy, {did_you_mean(name, [*registered, *names])}\n"
            f"registered are {', '.join(shown)}; a class is given by its path: my_package.MyStrategy"
        )
    others = [arg for arg in args if arg.partition("=")[0] != STRATEGY and arg not in options]
    return [*others, f"{STRATEGY}={json.dumps(strategy_class(name))}", *options]


def strategy_class(name: str) -> dict[str, Any]:
    """The class behind a registered name with its arguments, as in a configuration; any other name is a class's."""
    if name.lower() not in StrategyRegistry:
        return {"class_path": name}
    entry = StrategyRegistry[name.lower()]
    arguments = {key: _path(value) if callable(value) else value for key, value in entry["init_params"].items()}
    return {"class_path": _path(entry["strategy"]), "init_args": arguments}


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _help(arg: str, given: dict[str, Any]) -> str:
    """`--help.all` is the parser's own help; `--model.help` without a value shows the class that would run."""
    name, _, value = arg.partition("=")
    if arg == "--help.all":
        return "--help"
    if name in ("--model.help", "--data.help") and not value:
        return f"{name}={given.get(name[2:].removesuffix('.help'), '')}"
    if name == f"{STRATEGY}.help":
        return f"{name}={strategy_class(value or 'manual_allreduce')['class_path']}"
    return arg
