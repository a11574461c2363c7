"""What is measured: configurations, in an order that a drifting machine cannot favour."""

import argparse
import inspect
import pydoc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu import models
from lightning_mgpu.runs.errors import UsageError

BY_HAND = {"loop": "hand-written loop, one device", "book": "the book's multi-device loop"}
"""Engines that are the loop of `references.py`, in words."""


@dataclass(frozen=True)
class Configuration:
    """One thing to measure.

    Args:
        engine: `loop` and `book` are written by hand, `auto` is the Trainer on one device; else the name of a strategy,
            or the dotted path of its class.
        batch_size: Of the *global* batch.
        replicas: How many parameter sets share the one device; left out, one a device.
    """

    engine: str
    model: str = "LeNet"
    devices: int = 2
    batch_size: int = 256
    accelerator: str = "cpu"
    replicas: int | None = None

    def __str__(self) -> str:
        replicas = f"/replicas={self.replicas}" if self.replicas else ""
        return f"{self.model}/{self.engine}/{self.devices}/{self.batch_size}{replicas}"


def configurations(args: argparse.Namespace) -> list[Configuration]:
    """Every model under every strategy, and the loops that they are compared with; see the options of `cli.py`."""
    plan: list[Configuration] = []
    with_replicas = [name for name in args.strategies if _has_option(find_strategy(name)[0], "replicas")]
    for model in args.models:
        plan += [Configuration(engine, model, 1, args.batch_size, args.accelerator) for engine in ("loop", "auto")]
        for k in (k for k in args.devices if k > 1):
            batch = args.batch_size * k if args.scaling == "weak" else args.batch_size
            plan += [Configuration(engine, model, k, batch, args.accelerator) for engine in ("book", *args.strategies)]
        for r in args.replicas:
            engines = ("book", *with_replicas)
            plan += [Configuration(engine, model, 1, args.batch_size, args.accelerator, r) for engine in engines]
    return list(dict.fromkeys(plan))


def interleaved(plan: Sequence[Any], repeats: int) -> list[tuple[int, Any]]:
    """All of them once a repeat, another one first every time."""
    orders = ([*plan[i % len(plan) :], *plan[: i % len(plan)]] for i in range(repeats))
    return [(repeat, each) for repeat, order in enumerate(orders) for each in order]


def find_strategy(name: str) -> tuple[type[Strategy], dict[str, Any]]:
    """The class of a strategy, and the arguments that its name stands for.

    Raises:
        UsageError: If `name` is neither registered nor the dotted path of a Strategy.
    """
    if name in StrategyRegistry:
        return StrategyRegistry[name]["strategy"], dict(StrategyRegistry[name]["init_params"])
    found = pydoc.locate(name)
    if isinstance(found, type) and issubclass(found, Strategy):
        return found, {}
    known = ", ".join(name for name in StrategyRegistry if name.startswith(("dp", "manual_allreduce")))
    raise UsageError(f"--strategies {name}: no such strategy; take ddp, {known}, or a path, my_package.MyStrategy")


def make_model(name: str) -> LightningModule:
    """A model of this package by its name, or any LightningModule by its dotted path.

    Raises:
        UsageError: If there is none.
    """
    own = [each for each in models.__all__ if each != "Classifier"]
    found = getattr(models, name) if name in own else pydoc.locate(name)
    if isinstance(found, type) and issubclass(found, LightningModule):
        return found()
    raise UsageError(f"--models {name}: no LightningModule; take {', '.join(own)}, or a path, my_package.MyModel")


def _has_option(strategy: type[Strategy], name: str) -> bool:
    """Whether the class or one that it inherits from has such an option."""
    return any(name in inspect.signature(base.__init__).parameters for base in strategy.__mro__)  # type: ignore[misc]
