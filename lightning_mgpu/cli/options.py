"""Prepares a command line for jsonargparse: reads files, finds runs, and merges defaults.

In increasing priority: `configs/default.yaml`, the configuration of the checkpoint's run
(`--ckpt_path`, `--weights`), files and flags in order. `--resume` replaces the first two by the
configuration of the resumed run.
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
# not in `config.yaml`, which may be passed to another command
PATHS = ("run_dir", "weights", "ckpt_path")


@dataclass
class Options:
    """The options of a subcommand."""

    args: list[str]  # for jsonargparse, one string per option with its value
    cli_overrides: dict[str, Any]  # flags and files, by name: `{"trainer.devices": "2"}`
    base: dict[str, Any]  # nested configuration that they override
    run_dir: Path | None  # of the run to resume


def read_options(subcommand: str, args: Sequence[str]) -> Options:
    """Read the files, the run and the checkpoint named in `args`, and find their base."""
    joined = one_string_per_option(args)
    if "--resume" in joined:
        raise UsageError("--resume: no run given: use --resume=last or --resume=runs/NAME")
    resumed = [arg.partition("=")[2] for arg in joined if arg.startswith("--resume=")]
    joined = [arg for arg in joined if not arg.startswith("--resume=")]
    overrides = options_by_name(joined)
    if empty := [name for name in PATHS if overrides.get(name) == ""]:
        raise UsageError(f"--{empty[0]}= is empty: use a path, or remove the option")
    ckpt_path, run_dir = overrides.get("ckpt_path"), None
    if subcommand == "fit" and ckpt_path:
        raise UsageError("--ckpt_path: not an option of `fit`: use --resume=RUN or --weights=FILE")
    if ckpt_path and overrides.get("weights"):
        raise UsageError("--weights: --ckpt_path contains the weights already: use only one")
    if resumed and subcommand != "fit":
        raise UsageError("--resume: only `fit` can resume a run")
    if resumed:
        run_dir = newest_run() if resumed[-1] == "last" else Path(resumed[-1])
        if not (run_dir / CONFIG).is_file():
            raise UsageError(f"--resume={run_dir}: not a run directory: it contains no {CONFIG}")
        base = yaml_files.read_run_config(run_dir / CONFIG)
        base.setdefault("weights", read_run_json(run_dir).get("weights"))
    else:
        path = ckpt_path or overrides.get("weights")
        base = read_default_config() | (config_of(path, overrides) if path else {})
        for key in ("model", "data"):  # a class given by name starts from its own defaults
            named = overrides.get(key)
            if named and last_part(named) != last_part(base.get(key, {}).get("class_path")):
                base[key] = {"class_path": named}
    check_old_names(flatten(base) | overrides)
    return Options(expand_names(joined, overrides, base), overrides, base, run_dir)


def check_old_names(options: dict[str, Any]) -> None:
    """Raise a UsageError for old names of our strategies and of their options."""
    strategy = str(options.get("trainer.strategy"))
    if hint := renamed(strategy):
        raise UsageError(f"{STRATEGY}={strategy}: {hint}")
    for old in RENAMED if strategy.startswith(("exchange", "dp", "lightning_mgpu.")) else ():
        if old.removeprefix("--") in options:
            raise UsageError(renamed(old))


def newest_run() -> Path:
    """The newest run in `runs/` that `fit` can resume. Prints it, and the newer runs skipped."""
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
    """`["--a", "1", "-c", "x.yaml"]` -> `["--a=1", "--config={...}"]`, the file's content."""
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
    """Options given as flags and in files, by command-line name."""
    overrides: dict[str, Any] = {}
    for arg in args:
        name, _, text = arg.removeprefix("--").partition("=")
        value: Any = text
        if name == "config":
            overrides |= flatten(read_config(text))
        elif arg.startswith("--"):
            with suppress(UsageError):  # not every brace begins a mapping: {epoch}-{val_loss}
                value = read_config(text) if text.startswith("{") else text
            overrides |= flatten({name.rstrip("+"): value})
    return overrides


def config_of(ckpt_path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Model, data and seed of the run that wrote a checkpoint."""
    checkpoint = read_checkpoint(ckpt_path, bare=bool(overrides.get("weights")))
    if overrides.get("ckpt_path") and "pytorch-lightning_version" not in checkpoint:
        raise UsageError(f"--ckpt_path={ckpt_path}: not written by a Trainer: use --weights")
    path = config_beside(ckpt_path)
    if path is None and "model" not in overrides:
        raise UsageError(f"{ckpt_path} is not in a run directory: add --config=FILE or --model")
    config = yaml_files.read_run_config(path) if path else {}
    return {key: config[key] for key in ("seed_everything", "model", "data") if key in config}


def expand_names(args: list[str], overrides: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Replace names by classes, as jsonargparse needs them for help and for options."""
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
        raise UsageError(f"{options[0]}: no strategy given: add {STRATEGY}=manual_allreduce")
    others = [arg for arg in args if arg not in flags and arg not in options]
    return [*others, f"{STRATEGY}={json.dumps(strategy_config(name))}", *options]
