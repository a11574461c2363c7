"""A strategy by the name, or the dotted path, that a command line gives."""

import pydoc
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mgpu.tools import UsageError, did_you_mean, last_part

OUR_FUNCTIONS = {  # by the argument of a strategy
    "allreduce": "lightning_mgpu.allreduce.{}_allreduce",
    "exchange": "lightning_mgpu.exchanges.{}",
}


def find_strategy(name: str) -> tuple[Callable[..., Strategy], dict[str, Any]]:
    """What makes a strategy of this name or path, and its arguments: `(DDPStrategy, {})`."""
    if name in StrategyRegistry:
        entry = StrategyRegistry[name]
        return entry["strategy"], dict(entry["init_params"])
    found = pydoc.locate(name)
    if not callable(found):
        hint = did_you_mean(name, StrategyRegistry.available_strategies())
        raise UsageError(
            f"--trainer.strategy={name}: no such strategy. {hint}\n"
            "Take auto, ddp, dp, manual_allreduce, or the path of a class: my_package.MyStrategy"
        )
    return found, {}


def full_path(option: str) -> str:
    """`--trainer.strategy.allreduce=ring`: the option with the path of what has this short name."""
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
    """A new strategy for a Trainer. `auto` stays a name: the Trainer chooses."""
    if name == "auto":
        return name
    function, arguments = find_strategy(name)
    return function(**{**arguments, **options})


def strategy_config(name: str) -> dict[str, Any]:
    """The class of a strategy and its arguments, as a YAML file names them."""
    function, arguments = find_strategy(name)
    init_args = {key: _path(v) if callable(v) else v for key, v in arguments.items()}
    return {"class_path": _path(function), "init_args": init_args}


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
