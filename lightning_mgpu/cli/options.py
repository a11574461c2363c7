"""Reads a command line before jsonargparse parses it: files, checkpoints, and the values below.

Later ones win: `configs/default.yaml`, the configuration in a checkpoint (`--ckpt_path`), files and
flags in their order. With `--resume` the run's configuration stands in place of the first two.
"""

import pydoc
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.cli.checks import refuse_old_names
from lightning_mgpu.cli.error_messages import did_you_mean, last_part
from lightning_mgpu.cli.yaml_files import find_config, read_config, read_default_config
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import to_yaml
from lightning_mgpu.runs.checkpoint_file import flatten, read_checkpoint, saved_config
from lightning_mgpu.runs.resume import RESUME_FLAG, find_run, options_that_must_match
from lightning_mgpu.cli.strategy_names import strategy_config

STRATEGY = "--trainer.strategy"
COMMON = ("auto", "ddp", "dp", "fsdp", "manual_allreduce")


@dataclass
class Options:
    """The options of a subcommand.

    Attributes:
        args: The command line in jsonargparse's form, each option and its value in one string.
        given: The values given by flags and in files, by name: `{"trainer.devices": "2"}`.
        base_config: The configuration that they change, nested.
        pinned: Options that may have no other value than these, by name.
        source: Whose values the pinned ones are: a run directory or a checkpoint.
        resumed_run_dir: The directory of the run to resume.
    """

    args: list[str]
    given: dict[str, Any]
    base_config: dict[str, Any]
    pinned: dict[str, Any]
    source: object = None
    resumed_run_dir: Path | None = None


def read_options(subcommand: str, args: Sequence[str]) -> Options:
    """Find the files, the run and the checkpoint that are named, and what lies below the options.

    Raises:
        UsageError: If one of them is not there or cannot be read, or the strategy is unknown.
    """
    typed, run_dir = pop_resume_flag(one_string_per_option(args))
    if run_dir is not None and subcommand != "fit":
        raise UsageError(f"{RESUME_FLAG}: only `fit` can go on with a run")
    given = options_by_name(typed)
    source = run_dir or given.get("ckpt_path")
    if run_dir is not None:
        base = read_config(str(run_dir / "config.yaml"))
        pinned = options_that_must_match(base)
    else:
        base, pinned = _defaults_and_checkpoint(subcommand, given, given.get("ckpt_path"))
    values = {**flatten(base), **given}
    refuse_old_names(values)
    args = [expand_help_flag(arg, values) for arg in expand_strategy_name(typed, given, base)]
    return Options(args, given, base, pinned, source, run_dir)


def one_string_per_option(args: Sequence[str]) -> list[str]:
    """`["--a", "1", "-c", "x.yaml"]` -> `["--a=1", "--config=/path/to/x.yaml"]`, with `~` expanded.

    `--model=model.yaml` becomes the content of the file: a class and its arguments.
    """
    joined: list[str] = []
    for arg in args:
        before = joined[-1] if joined else ""
        if before.startswith("-") and "=" not in before and not arg.startswith(("--", "-c")):
            joined[-1] = f"{before}={arg}"
        else:
            joined.append(arg)
    joined = [arg.replace("=~/", f"={Path.home()}/", 1) for arg in joined]
    return [resolve_config_path(arg) for arg in joined]


def resolve_config_path(arg: str) -> str:
    name, _, value = arg.partition("=")
    if name in ("--model", "--data") and value.endswith((".yaml", ".yml")):
        return f"{name}={to_yaml(read_config(value, name), in_a_line=True)}"
    if name not in ("-c", "--config") or value.startswith("{"):
        return arg
    return f"--config={find_config(value)}"


def pop_resume_flag(args: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--resume`, and the directory of the run that it names."""
    flags = [arg for arg in args if arg.partition("=")[0] == RESUME_FLAG]
    others = [arg for arg in args if arg not in flags]
    return others, find_run(flags[-1].partition("=")[2]) if flags else None


def options_by_name(args: Sequence[str]) -> dict[str, Any]:
    """The options given, as flags and in files, by their name on the command line."""
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


def _defaults_and_checkpoint(
    subcommand: str, given: dict[str, Any], ckpt_path: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration below the options given, and the options that a checkpoint pins.

    A class that is given starts from its own defaults: as a `default_config_files` of the parser,
    `default.yaml` would give LeNet's settings to every model.
    """
    saved: dict[str, Any] = {}
    if ckpt_path is not None:
        checkpoint = read_checkpoint(ckpt_path, to_train_on=subcommand == "fit")
        saved = saved_config(checkpoint, ckpt_path)
    base = read_default_config() | saved
    for key in ("model", "data"):
        named, default = given.get(key), (base.get(key) or {}).get("class_path", "")
        if isinstance(named, str) and last_part(named) != last_part(default):
            base[key] = {"class_path": named}
    model = saved.get("model")
    if model and subcommand != "fit":
        # its arguments, such as flip_tta, may be others in a test
        model = {"class_path": model["class_path"]}
    return base, flatten({"model": model}) if model else {}


def expand_strategy_name(args: list[str], given: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """The arguments with a strategy's class for its name where the class or options are given.

    jsonargparse takes `--trainer.strategy=ddp` for a text, and a text has no options.
    """
    default = (base.get("trainer") or {}).get("strategy", "auto")
    name = given.get(STRATEGY.removeprefix("--"), default)
    is_option = re.compile(rf"{STRATEGY}\.(?!help\b)").match
    options = [arg for arg in args if is_option(arg)]
    values = [arg.partition("=")[2] for arg in args if arg.startswith(f"{STRATEGY}=")]
    has_class = values and values[-1].startswith("{")  # and arguments, which stay
    registered = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(name, str) or has_class or (name in registered and not options):
        return args
    if name == "auto":
        raise UsageError(
            f"{options[0]}: an option of which strategy? Add its name, such as "
            f"{STRATEGY}=manual_allreduce"
        )
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


def expand_help_flag(arg: str, values: dict[str, Any]) -> str:
    """`--help.all` is the parser's help; `--model.help` alone shows the class that would run."""
    name, _, value = arg.partition("=")
    if arg == "--help.all":
        return "--help"
    if name in ("--model.help", "--data.help") and not value:
        return f"{name}={values[name[2:].removesuffix('.help')]}"
    if name == f"{STRATEGY}.help":
        return f"{name}={strategy_config(value or 'manual_allreduce')['class_path']}"
    return arg
