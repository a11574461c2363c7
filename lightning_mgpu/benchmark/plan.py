"""What is measured: configurations, one after the other, in an order that a drifting machine cannot favour."""

from dataclasses import asdict, dataclass
from typing import Any

REFERENCES = {
    "loop": "hand-written loop, one device",
    "book": "the book's multi-device loop",
    "auto": "one device",
}
"""Engines that are no strategy of several devices, in words."""


@dataclass(frozen=True)
class Configuration:
    """One thing to measure.

    Args:
        engine: `loop` and `book` are written by hand, `auto` is the Trainer on one device; else a strategy's name.
        model: `LeNet`, `ResNet18`, or the dotted path of a LightningModule.
        devices: How many.
        batch_size: Of the *global* batch.
    """

    engine: str
    model: str = "LeNet"
    devices: int = 2
    batch_size: int = 256
    accelerator: str = "cpu"

    @property
    def key(self) -> str:
        return f"{self.model}/{self.engine}/{self.devices}/{self.batch_size}"

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def configurations(
    strategies: list[str], models: list[str], devices: list[int], batch_size: int, accelerator: str, scaling: str
) -> list[Configuration]:
    """Every strategy, model and device count, and the references they are compared with.

    Args:
        scaling: `strong` keeps the global batch, `weak` multiplies it by the number of devices, as the book does.
    """
    plan: list[Configuration] = []
    for model in models:
        batches = dict.fromkeys(batch_size * (k if scaling == "weak" else 1) for k in devices)
        plan += [
            Configuration(engine, model, 1, B, accelerator)
            for B in {batch_size: None, **batches}
            for engine in ("loop", "auto")
        ]
        for k in devices:
            if k > 1:
                B = batch_size * (k if scaling == "weak" else 1)
                plan += [Configuration(engine, model, k, B, accelerator) for engine in ("book", *strategies)]
    return list(dict.fromkeys(plan))


def interleaved(plan: list[Configuration], repeats: int) -> list[tuple[int, Configuration]]:
    """All configurations once a repeat, another one first every time."""
    return [
        (repeat, configuration)
        for repeat in range(repeats)
        for configuration in plan[repeat % len(plan) :] + plan[: repeat % len(plan)]
    ]
