"""The things to measure: models under strategies, beside loops written by hand."""

import pydoc
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_mgpu import models as package_models
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy

BY_HAND = {"loop": "hand-written loop, one device", "book": "the book's multi-device loop"}
"""Engines that are a loop by hand, and what reports call them."""


@dataclass(frozen=True)
class Configuration:
    """One thing to measure.

    Args:
        engine: `loop` or `book`, by hand; `auto`, the Trainer on one device; else a strategy's name
            or path.
        batch_size: Global.
        replicas: How many share the one device. Left out, every device has one.
        processes: How many share the devices. Left out, the strategy's own number.
        num_steps: Of each stretch that is timed.
    """

    engine: str
    model: str = "LeNet"
    devices: int = 2
    batch_size: int = 256
    replicas: int | None = None
    processes: int | None = None
    num_steps: int = 20


def configurations(
    models: Sequence[str],
    strategies: Sequence[str],
    devices: Sequence[int],
    replicas: Sequence[int],
    processes: Sequence[int],
    batch_size: int,
    num_steps: int,
) -> list[Configuration]:
    """Every model under every strategy, and the loops by hand to compare with.

    Raises:
        ValueError: If there is no such model or strategy.
    """
    for model in models:
        make_model(model)
    made = {name: make_strategy(name) for name in strategies}
    ours = [name for name, each in made.items() if isinstance(each, TrainBatchStrategy)]
    over_processes = [name for name in ours if getattr(made[name], "takes_processes", False)]
    engines: list[tuple[str, int, int | None, int | None]] = [("loop", 1, None, None)]
    engines += [("auto", 1, None, None)]
    for k in devices:
        engines += [(engine, k, None, None) for engine in ("book", *strategies) if k > 1]
        for num in processes:
            engines += [(engine, k, None, num) for engine in over_processes if k % num == 0]
    for num_replicas in replicas:
        engines += [(engine, 1, num_replicas, None) for engine in ("book", *ours)]
    return [
        Configuration(engine, model, k, batch_size, num_replicas, num_processes, num_steps)
        for model in models
        for engine, k, num_replicas, num_processes in engines
    ]


def make_model(name: str) -> LightningModule:
    """A model of this package by its name, or any LightningModule by its dotted path."""
    found = getattr(package_models, name, None) or pydoc.locate(name)
    if isinstance(found, type) and issubclass(found, LightningModule):
        return found()
    raise ValueError(
        f"model {name}: no such LightningModule. Take LeNet, ResNet18, or a path: "
        "my_package.MyModel"
    )
