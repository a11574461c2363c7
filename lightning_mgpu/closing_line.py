"""The line both chapters of the book end with."""

import math
from typing import Any


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float, devices: str) -> str:
    """`test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`; the seconds are NaN where no epoch was trained."""
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    time = "no epoch trained" if math.isnan(seconds_per_epoch) else f"{seconds_per_epoch:.1f} sec/epoch"
    return ", ".join([*results, f"{time} on {devices}"])
