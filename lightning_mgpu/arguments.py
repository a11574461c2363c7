"""Conveniences of the command line that become plain LightningCLI arguments before anything is parsed."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_mgpu.config_file import check_config_file
from lightning_mgpu.errors import UsageError

PACKAGE = Path(__file__).parent
CONFIGS = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())  # wheel, checkout
STRATEGY = "--trainer.strategy"
MAX_NESTED = 200  # brackets in one value; libyaml overflows the stack at some ten thousands


def check_values(args: list[str]) -> list[str]:
    """The arguments, if no value would end the YAML parser in a crash.

    Raises:
        UsageError: For a value with a YAML tag, nested beyond reason, or lost by argparse.
    """
    for arg in args:
        value = arg.partition("=")[2] if arg.startswith("--") else arg
        if value.lstrip().startswith("!!"):
            raise UsageError(f"{arg}: YAML tags are not taken")
        if max(value.count("["), value.count("{")) > MAX_NESTED:
            raise UsageError(f"{arg[:40]}...: nested too deeply")
        if value == "--":
            raise UsageError(f"{arg}: a value is missing")
    return args


def with_strategy_class(args: list[str]) -> list[str]:
    """The arguments with a strategy's registered name replaced by its class where options of it follow.

    `--trainer.strategy=ddp --trainer.strategy.find_unused_parameters=true`: jsonargparse takes options of classes only.
    """
    if not any(arg.startswith(f"{STRATEGY}.") for arg in args):
        return args
    found: list[str] = []
    for arg in args:
        name = arg.removeprefix(f"{STRATEGY}=")
        is_next = bool(found) and found[-1] == STRATEGY  # given as two arguments
        if (arg.startswith(f"{STRATEGY}=") or is_next) and name.lower() in StrategyRegistry:
            registered = StrategyRegistry[name.lower()]
            found[len(found) - is_next :] = [f"{STRATEGY}={_as_argument(registered['strategy'])}"]
            found += [f"{STRATEGY}.{key}={_as_argument(value)}" for key, value in registered["init_params"].items()]
        else:
            found.append(arg)
    return found


def _as_argument(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)


def with_shipped_configs(args: list[str]) -> list[str]:
    """The arguments with every `--config` that names no file here, but one in `configs/`, replaced by that path.

    Raises:
        UsageError: If there is no such file, or it is not good (see `config_file.py`).
    """
    found = list(args)
    for i, arg in enumerate(args):
        if arg in ("--config", "-c") and i + 1 < len(args):
            found[i + 1] = find_config(args[i + 1])
        elif arg.startswith("--config="):
            found[i] = "--config=" + find_config(arg.removeprefix("--config="))
    return found


def find_config(name: str) -> str:
    """The path of a YAML file here or in `configs/`."""
    if name.startswith("{"):  # a configuration itself: a checkpoint's
        return name
    path = Path(name) if Path(name).exists() else CONFIGS / name
    if not path.is_file():
        shipped = {file.stem: str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.yaml"))}
        close = get_close_matches(path.stem, shipped, n=1)
        near = f" (did you mean {shipped[close[0]]}?)" if close else ""
        raise UsageError(f"--config={name}: no such file here{near}; those shipped are {', '.join(shipped.values())}")
    check_config_file(name, path)
    return str(path)
