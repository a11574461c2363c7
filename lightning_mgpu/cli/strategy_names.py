"""A strategy by the name, or the dotted path, that a command line gives."""

import pydoc
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry


def find_strategy(name: str) -> tuple[Callable[..., Strategy], dict[str, Any]]:
    """What makes a strategy, and its arguments: `dp` -> `(DataParallelStrategy, {})`.

    Args:
        name: A registered name, or the path of a Strategy or of a function that returns one.

    Raises:
        ValueError: If there is no such strategy.
    """
    if name in StrategyRegistry:
        entry = StrategyRegistry[name]
        return entry["strategy"], dict(entry["init_params"])
    found = pydoc.locate(name)
    if not callable(found):
        raise ValueError(
            f"strategy {name}: no such strategy. Take ddp, dp, manual_allreduce, another name that "
            "Lightning knows, or the path of a class: my_package.MyStrategy"
        )
    return found, {}


def make_strategy(name: str, **options: Any) -> Strategy | str:
    """A new strategy for a Trainer. `auto` stays a name: the Trainer chooses.

    Raises:
        ValueError: If there is no such strategy.
    """
    if name == "auto":
        return name
    function, arguments = find_strategy(name)
    return function(**{**arguments, **options})


def strategy_config(name: str) -> dict[str, Any]:
    """The class of a strategy and its arguments, as a YAML file names them."""
    if name not in StrategyRegistry:
        return {"class_path": name}
    function, arguments = find_strategy(name)
    init_args = {key: _path(v) if callable(v) else v for key, v in arguments.items()}
    return {"class_path": _path(function), "init_args": init_args}


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
