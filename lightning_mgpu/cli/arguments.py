"""Conveniences of the command line that become plain arguments of the LightningCLI before anything is parsed.

What comes out: the defaults first, then what was given, in its order; what stands later wins.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.cli.errors import UsageError
from lightning_mgpu.cli.subcommands import RUNS
from lightning_mgpu.cli.yaml_files import CONFIGS, find_config, load, options_for, read_config
from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config
from lightning_mgpu.runs.flatten import flatten
from lightning_mgpu.runs.launchers import is_restart, job_name
from lightning_mgpu.runs.resume import FLAG, find_run

HAVE_NO_VALUE = ("-h", "--help", "--help.all", "--print_config", "--traceback", "--no-wandb")
STRATEGY = "--trainer.strategy"
DEFAULT_STEM = "default.yaml"


def prepare(subcommand: str, args: Sequence[str]) -> list[str]:
    """The arguments behind a subcommand of the LightningCLI, in the form that it takes."""
    args = [_config(subcommand, arg) for arg in join(args)]
    given = given_options(subcommand, args)
    if "resume" not in given and subcommand == "fit" and is_restart():
        run_dir = Path(str(given.get("run_dir") or Path("runs", job_name() or "")))
        if (run_dir / "config.yaml").is_file():
            args = [f"{FLAG}={run_dir}"]  # of a job that SLURM has queued again
    if any(arg.startswith(f"{FLAG}=") for arg in args):
        return _help(_resume(subcommand, args), given)
    if "resume" in given:
        raise UsageError(f"{FLAG} needs a run: {FLAG}=RUN_DIR or {FLAG}=last, on the command line")
    defaults = _defaults(given)
    if subcommand != "fit":
        defaults.pop("scale_by_devices", None)  # of a checkpoint's run
    return _help([f"--config={json.dumps(defaults)}", *_strategy(args, given)], {**flatten(defaults), **given})


def split_subcommand(args: Sequence[str]) -> tuple[str, list[str]]:
    """The subcommand and the other arguments. A `--config` may stand before it, and may name it by its section."""
    configs, rest = [], join(args)
    while rest and rest[0].startswith("--config="):
        configs.append(rest.pop(0))
    if rest and not rest[0].startswith("-"):
        return rest[0], [*configs, *rest[1:]]
    sections = {key for config in configs for key in read_config(config.removeprefix("--config=")) if key in RUNS}
    return (sections.pop() if len(sections) == 1 else ""), [*configs, *rest]


def join(args: Sequence[str]) -> list[str]:
    """The arguments with every option and its value in one: `--trainer.devices=2`."""
    joined: list[str] = []
    for arg in args:
        arg = f"--config{arg[2:]}" if arg == "-c" or arg.startswith("-c=") else arg
        before = joined[-1] if joined else ""
        waits = before.startswith("--") and "=" not in before and before not in HAVE_NO_VALUE
        if waits and not arg.startswith("--"):
            joined[-1] = f"{before}={arg}"
        else:
            joined.append(arg)
    return joined


def given_options(subcommand: str, args: Sequence[str]) -> dict[str, Any]:
    """What options were given, as flags and in files, under their names on the command line."""
    given: dict[str, Any] = {}
    for arg in args:
        name, _, value = arg.removeprefix("--").partition("=")
        if name == "config":
            given |= flatten(options_for(subcommand, value))
        elif arg.startswith("--"):
            content = load(value) if value.startswith("{") else value
            given |= flatten({name: content})
    return given


def _config(subcommand: str, arg: str) -> str:
    """A `--config` as the path that it was found under, or as the subcommand's section of it."""
    name = arg.removeprefix("--config=")
    if name == arg or not name:
        return arg
    content = read_config(name)
    options = options_for(subcommand, name)
    if "resume" in options:
        raise UsageError(f"--config={name} holds a resume: say {FLAG}=RUN_DIR on the command line instead")
    return f"--config={json.dumps(options)}" if options is not content and options != content else _found(name)


def _found(name: str) -> str:
    return f"--config={name if name.startswith('{') else find_config(name)}"


def _defaults(given: dict[str, Any]) -> dict[str, Any]:
    """`configs/default.yaml`, over it a given checkpoint's configuration; a class that is named has its own defaults.

    As a `default_config_files` of the parser, the file would give LeNet's settings to every other model.
    """
    defaults = read_config(str(CONFIGS / DEFAULT_STEM))
    path = os.path.expanduser(str(given.get("ckpt_path") or ""))
    saved = saved_config(read_checkpoint(path)) if path and "://" not in path and path != "hpc" else {}
    asked, has = (str(part).rpartition(".")[2] for part in (given.get("model", ""), _class(saved.get("model"))))
    if has and asked and asked != has:
        raise UsageError(f"--ckpt_path={path} is of {has}, not of {asked}: take --model={has}, or leave --model out")
    defaults |= saved
    for key in ("model", "data"):
        named = given.get(key)
        if isinstance(named, str) and named.rpartition(".")[2] != _class(defaults[key]).rpartition(".")[2]:
            defaults[key] = {"class_path": named}
    return defaults


def _class(section: Any) -> str:
    return str(section.get("class_path", "")) if isinstance(section, dict) else str(section or "")


def _resume(subcommand: str, args: list[str]) -> list[str]:
    """The arguments with the run's configuration before them, and `--resume` as the path of its directory."""
    if subcommand != "fit":
        raise UsageError(f"{FLAG} goes on with training: python -m lightning_mgpu fit {FLAG}=RUN_DIR")
    if any(arg.startswith("--ckpt_path=") for arg in args):
        raise UsageError(f"{FLAG} takes the run's own checkpoint: leave --ckpt_path out")
    run_dir = find_run(next(arg for arg in args if arg.startswith(f"{FLAG}=")).removeprefix(f"{FLAG}="))
    others = [arg for arg in args if not arg.startswith(f"{FLAG}=")]
    config = f"--config={run_dir / 'config.yaml'}"
    return [config, *_strategy(others, given_options("fit", others)), f"{FLAG}={run_dir}"]


def _strategy(args: list[str], given: dict[str, Any]) -> list[str]:
    """The arguments with a strategy's class for its name, where options of the class are given, or the class itself.

    jsonargparse takes `--trainer.strategy=ddp` for a text, and a text has no options.
    """
    name = given.get(STRATEGY.removeprefix("--"))
    options = [arg for arg in args if arg.startswith(f"{STRATEGY}.")]
    if not isinstance(name, str) or (not options and "." not in name):
        return args
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


def _help(args: list[str], given: dict[str, Any]) -> list[str]:
    """`--help.all` is the parser's own help; `--model.help` without a value shows the class that would run."""
    found = []
    for arg in args:
        name, _, value = arg.partition("=")
        if arg == "--help.all":
            arg = "--help"
        elif name in ("--model.help", "--data.help") and not value:
            arg = f"{name}={given[name[2:].removesuffix('.help')]}"
        elif name == f"{STRATEGY}.help":
            arg = f"{name}={strategy_class(value or 'manual_allreduce')['class_path']}"
        found.append(arg)
    return found
