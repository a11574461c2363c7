"""Finds strategies by name or dotted path."""

import pydoc
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mgpu.tools import UsageError, did_you_mean, last_part

OUR_FUNCTIONS = {  # paths of short names, by argument of a strategy
    "allreduce": "lightning_mgpu.allreduce.{}_allreduce",
    "exchange": "lightning_mgpu.exchanges.{}",
}


def find_strategy(name: str) -> tuple[Callable[..., Strategy], dict[str, Any]]:
    """The class or function that creates a strategy, and its arguments: `(DDPStrategy, {})`."""
    if name in StrategyRegistry:
        entry = StrategyRegistry[name]
        return entry["strategy"], dict(entry["init_params"])
    found = pydoc.locate(name)
    if not callable(found):
        hint = did_you_mean(name, StrategyRegistry.available_strategies())
        raise UsageError(
            f"--trainer.strategy={name}: no such strategy. {hint}\n"
            "Use auto, ddp, dp, manual_allreduce, or the path of a class: my_package.MyStrategy"
        )
    return found, {}


def full_path(option: str) -> str:
    """The option with the full path for a short name: `--trainer.strategy.allreduce=ring`."""
    flag, _, name = option.partition("=")
    if flag == "--trainer.strategy.help" and name in StrategyRegistry:
        config = strategy_config(name)
        options = "".join(f" {key}={value}" for key, value in config["init_args"].items())
        print(f"{name}: {config['class_path']}{options}\n")
        return f"{flag}={config['class_path']}"
    pattern = OUR_FUNCTIONS.get(last_part(flag), "")
    path = pattern.format(name)
    return f"{flag}={path}" if pattern and pydoc.locate(path) else option


def make_strategy(name: str, **options: Any) -> Strategy | str:
    """A new strategy for a Trainer. `auto` is returned as it is: the Trainer chooses."""
    if name == "auto":
        return name
    function, arguments = find_strategy(name)
    return function(**{**arguments, **options})


def strategy_config(name: str) -> dict[str, Any]:
    """The class of a strategy and its arguments, as in a YAML file."""
    function, arguments = find_strategy(name)
    init_args = {key: _path(v) if callable(v) else v for key, v in arguments.items()}
    return {"class_path": _path(function), "init_args": init_args}


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
