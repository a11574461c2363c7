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
        engine: `loop` and `book` are written by hand, `auto` is the Trainer on one device; else a strategy's name, or
            the dotted path of its class.
        model: `LeNet`, `ResNet18`, or the dotted path of a LightningModule.
        devices: How many.
        batch_size: Of the *global* batch.
        lr_factor: The model's learning rate is multiplied by it: k for a k times larger batch, as in the book.
    """

    engine: str
    model: str = "LeNet"
    devices: int = 2
    batch_size: int = 256
    accelerator: str = "cpu"
    lr_factor: int = 1

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
        scaling: `strong` keeps the global batch; `weak` multiplies it, and the learning rate, by the number of devices,
            as the book does.
    """
    plan: list[Configuration] = []
    factors = {k: k if scaling == "weak" else 1 for k in devices}
    for model in models:
        plan += [
            Configuration(engine, model, 1, batch_size * factor, accelerator, factor)
            for factor in dict.fromkeys([1, *factors.values()])
            for engine in ("loop", "auto")
        ]
        for k, factor in factors.items():
            if k > 1:
                B = batch_size * factor
                plan += [Configuration(engine, model, k, B, accelerator, factor) for engine in ("book", *strategies)]
    return list(dict.fromkeys(plan))


def interleaved(plan: list[Configuration], repeats: int) -> list[tuple[int, Configuration]]:
    """All configurations once a repeat, another one first every time."""
    return [
        (repeat, configuration)
        for repeat in range(repeats)
        for configuration in plan[repeat % len(plan) :] + plan[: repeat % len(plan)]
    ]
