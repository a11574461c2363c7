"""Reads a command line before jsonargparse parses it: files, runs, and the values below.

Later ones win: `configs/default.yaml`, the configuration of the run that a checkpoint belongs to
(`--ckpt_path`, `--weights`), files and flags in their order. With `--resume` the configuration of
the run stands in place of the first two.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli import yaml_files
from lightning_mgpu.cli.strategy_names import full_path, strategy_config
from lightning_mgpu.cli.yaml_files import dump_config, read_config, read_default_config
from lightning_mgpu.runs.checkpoints import read_checkpoint
from lightning_mgpu.runs.directory import CONFIG, config_beside, flatten, newest_fits, read_run_json
from lightning_mgpu.runs.resume import find_last
from lightning_mgpu.tools import RENAMED, UsageError, last_part, renamed

STRATEGY = "--trainer.strategy"
HELP = f"{STRATEGY}.help"
# not in `config.yaml`, which another command may be given
PATHS = ("run_dir", "weights", "ckpt_path")


@dataclass
class Options:
    """The options of a subcommand."""

    args: list[str]  # as jsonargparse takes them, each option and its value in one string
    cli_overrides: dict[str, Any]  # by flags and in files, by name: `{"trainer.devices": "2"}`
    base: dict[str, Any]  # the configuration that they change, nested
    run_dir: Path | None  # of the run to resume


def read_options(subcommand: str, args: Sequence[str]) -> Options:
    """Find the files, the run, the checkpoint that are named, and what lies below the options."""
    joined = one_string_per_option(args)
    if "--resume" in joined:
        raise UsageError("--resume: with which run? --resume=last, or --resume=runs/NAME")
    resumed = [arg.partition("=")[2] for arg in joined if arg.startswith("--resume=")]
    joined = [arg for arg in joined if not arg.startswith("--resume=")]
    overrides = options_by_name(joined)
    if empty := [name for name in PATHS if overrides.get(name) == ""]:
        raise UsageError(f"--{empty[0]}= names nothing: give a path, or leave the option out")
    ckpt_path, run_dir = overrides.get("ckpt_path"), None
    if subcommand == "fit" and ckpt_path:
        raise UsageError("--ckpt_path: `fit` goes on by --resume=RUN, or starts by --weights=FILE")
    if ckpt_path and overrides.get("weights"):
        raise UsageError("--weights: --ckpt_path has the weights, too: leave one out")
    if resumed and subcommand != "fit":
        raise UsageError("--resume: only `fit` can go on with a run")
    if resumed:
        run_dir = newest_run() if resumed[-1] == "last" else Path(resumed[-1])
        if not (run_dir / CONFIG).is_file():
            raise UsageError(f"--resume={run_dir}: not a run directory, which has a {CONFIG}")
        base = yaml_files.read_run_config(run_dir / CONFIG)
        base.setdefault("weights", read_run_json(run_dir).get("weights"))
    else:
        path = ckpt_path or overrides.get("weights")
        base = read_default_config() | (config_of(path, overrides) if path else {})
        for key in ("model", "data"):  # a class that is named starts from its own defaults
            named = overrides.get(key)
            if named and last_part(named) != last_part(base.get(key, {}).get("class_path")):
                base[key] = {"class_path": named}
    refuse_old_names(flatten(base) | overrides)
    return Options(expand_names(joined, overrides, base), overrides, base, run_dir)


def refuse_old_names(options: dict[str, Any]) -> None:
    """Raise a UsageError for options of our strategies, and of a resumed run, by earlier names."""
    strategy = str(options.get("trainer.strategy"))
    if hint := renamed(strategy):
        raise UsageError(f"{STRATEGY}={strategy}: {hint}")
    for old in RENAMED if strategy.startswith(("exchange", "dp", "lightning_mgpu.")) else ():
        if old.removeprefix("--") in options:
            raise UsageError(renamed(old))


def newest_run() -> Path:
    """The newest run in `runs/` that `fit` can resume; prints which, and the newer ones skipped."""
    for path in newest_fits():
        try:
            find_last(path, yaml_files.read_run_config(path / CONFIG), None)
        except UsageError as error:
            rank_zero_only(print)(f"--resume=last: skipped: {error}")
            continue
        rank_zero_only(print)(f"--resume=last: {path}")
        return path
    raise UsageError("--resume=last: no run in runs/ can be resumed")


def one_string_per_option(args: Sequence[str]) -> list[str]:
    """`["--a", "1", "-c", "x.yaml"]` -> `["--a=1", "--config={...}"]`: what is in the file."""
    joined: list[str] = []
    for arg in args:
        is_value = arg != "-c" and not arg.startswith(("--", "-c="))
        if is_value and joined and "=" not in joined[-1]:
            joined[-1] += f"={arg}"
        else:
            joined.append("--config" + arg[2:] if arg[:3] in ("-c", "-c=") else arg)
    files = {arg: read_config(arg[9:]) for arg in joined if arg.startswith("--config=")}
    return [f"--config={dump_config(files[arg], True)}" if arg in files else arg for arg in joined]


def options_by_name(args: Sequence[str]) -> dict[str, Any]:
    """Options given as flags and in files, by their name on the command line."""
    overrides: dict[str, Any] = {}
    for arg in args:
        name, _, text = arg.removeprefix("--").partition("=")
        value: Any = text
        if name == "config":
            overrides |= flatten(read_config(text))
        elif arg.startswith("--"):
            with suppress(UsageError):  # other texts begin with a brace, too: {epoch}-{val_loss}
                value = read_config(text) if text.startswith("{") else text
            overrides |= flatten({name.rstrip("+"): value})
    return overrides


def config_of(ckpt_path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Model, data and seed of the run that a checkpoint belongs to."""
    checkpoint = read_checkpoint(ckpt_path, bare=bool(overrides.get("weights")))
    if overrides.get("ckpt_path") and "pytorch-lightning_version" not in checkpoint:
        raise UsageError(f"--ckpt_path={ckpt_path}: a Trainer has not written it")
    path = config_beside(ckpt_path)
    if path is None and "model" not in overrides:
        raise UsageError(f"{ckpt_path} is in no run directory: give --config=FILE, or --model")
    config = yaml_files.read_run_config(path) if path else {}
    return {key: config[key] for key in ("seed_everything", "model", "data") if key in config}


def expand_names(args: list[str], overrides: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """The arguments with classes for names where jsonargparse needs one: for help and options."""
    trainer = base.get("trainer") or {}
    name = overrides.get("trainer.strategy") or trainer.get("strategy") or "auto"
    helps = {"--help.all": "--help"} | ({} if name == "auto" else {HELP: f"{HELP}={name}"})
    for key in ("model", "data"):
        helps[f"--{key}.help"] = f"--{key}.help={overrides.get(key) or base[key]['class_path']}"
    args = [full_path(helps.get(arg, arg)) for arg in args]
    flags = [arg for arg in args if arg.startswith(f"{STRATEGY}=")]
    options = [arg for arg in args if arg.startswith(f"{STRATEGY}.") and ".help=" not in arg]
    is_class = not isinstance(name, str) or any("={" in flag for flag in flags)
    if is_class or not (options if name == "auto" or name in StrategyRegistry else flags):
        return args
    if name == "auto":
        raise UsageError(f"{options[0]}: of which strategy? Add {STRATEGY}=manual_allreduce, or so")
    others = [arg for arg in args if arg not in flags and arg not in options]
    return [*others, f"{STRATEGY}={json.dumps(strategy_config(name))}", *options]
