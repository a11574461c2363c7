"""From measurements to figures: medians, spread, ratios within a repeat, efficiency. No clock is read here."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mgpu.benchmark.parts import PARTS

Measurement = dict[str, Any]
"""Of a configuration in one process: `step` (s), `samples` in it, `parts` (s by name), `memory` (bytes), `threads`."""


@dataclass(frozen=True)
class Summary:
    """One configuration over all repeats.

    Args:
        step: Seconds, the median over repeats; `low` and `high` are the extremes.
        rate: Samples a second over all devices, at the median step.
        parts: Seconds of the parts of a step, medians scaled to add up to `step`.
    """

    configuration: dict[str, Any]
    step: float
    low: float
    high: float
    rate: float
    parts: dict[str, float]
    memory: float
    threads: int
    repeats: int

    @property
    def key(self) -> str:
        return "{model}/{engine}/{devices}/{batch_size}".format(**self.configuration)


def summarise(result: dict[str, Any]) -> Summary | None:
    """Summarise a configuration's measurements; `None` if there is none."""
    measured = [repeat for repeat in result["repeats"] if repeat is not None]
    if not measured:
        return None
    steps = [repeat["step"] for repeat in measured]
    step = statistics.median(steps)
    parts = {part: statistics.median(repeat["parts"][part] for repeat in measured) for part in PARTS}
    total = sum(parts.values())
    return Summary(
        configuration=result["configuration"],
        step=step,
        low=min(steps),
        high=max(steps),
        rate=result["configuration"]["batch_size"] / step,
        parts={part: seconds * step / total for part, seconds in parts.items()},
        memory=statistics.median(repeat["memory"] for repeat in measured),
        threads=measured[0]["threads"],
        repeats=len(measured),
    )


def ratio(own: Sequence[Measurement | None], other: Sequence[Measurement | None]) -> float | None:
    """How many times as many samples a second as the other, the median of the ratios within each repeat.

    `None` where no repeat has both.
    """
    ratios = [_rate(a) / _rate(b) for a, b in zip(own, other) if a is not None and b is not None]
    return statistics.median(ratios) if ratios else None


def efficiency(
    own: Sequence[Measurement | None], of_one: Sequence[Measurement | None], num_devices: int
) -> float | None:
    """Throughput over k times that of one device, the median within each repeat: 1 is perfect scaling."""
    times_one = ratio(own, of_one)
    return None if times_one is None else times_one / num_devices


def _rate(measurement: Measurement) -> float:
    return float(measurement["samples"] / measurement["step"])
