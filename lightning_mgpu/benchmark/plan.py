"""What is measured: models under strategies, beside loops written by hand."""

import argparse
import pydoc
from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_mgpu import models
from lightning_mgpu.errors import UsageError
from lightning_mgpu.strategies.names import make_strategy

BY_HAND = {"loop": "hand-written loop, one device", "book": "the book's multi-device loop"}
"""Engines that are a loop by hand, in words."""


@dataclass(frozen=True)
class Configuration:
    """One thing to measure."""

    # `loop` and `book`, by hand; `auto`, the Trainer on one device; else a strategy's name or path
    engine: str
    model: str = "LeNet"
    devices: int = 2
    batch_size: int = 256  # global
    replicas: int | None = None  # that share the one device; left out, one a device
    num_steps: int = 20  # of a stretch


def configurations(args: argparse.Namespace) -> list[Configuration]:
    """Every model under every strategy, and loops to compare with; see the options of `cli.py`."""
    engines: list[tuple[str, int, int | None]] = [("loop", 1, None), ("auto", 1, None)]
    engines += [
        (engine, k, None) for k in args.devices if k > 1 for engine in ("book", *args.strategies)
    ]
    ours = [name for name in args.strategies if hasattr(make_strategy(name), "num_replicas")]
    engines += [(engine, 1, r) for r in args.replicas for engine in ("book", *ours)]
    return [
        Configuration(engine, model, devices, args.batch_size, replicas, args.num_steps)
        for model in args.models
        for engine, devices, replicas in engines
    ]


def make_model(name: str) -> LightningModule:
    """A model of this package by its name, or any LightningModule by its dotted path."""
    found = getattr(models, name, None) or pydoc.locate(name)
    if isinstance(found, type) and issubclass(found, LightningModule):
        return found()
    raise UsageError(
        f"--models {name}: no LightningModule; take LeNet, ResNet18, or a path, my_package.MyModel"
    )
