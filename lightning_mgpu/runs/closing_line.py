"""What `fit` ends with: a fingerprint of the trained parameters, and the line both chapters of the book end with."""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """The first 12 hex digits of a SHA-256 over the bytes of all parameters in order; buffers are left out.

    Two runs with the same fingerprint have trained the same bits.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float, devices: str) -> str:
    """`test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`; the seconds are NaN where no epoch was trained."""
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    time = "no epoch trained" if math.isnan(seconds_per_epoch) else f"{seconds_per_epoch:.1f} sec/epoch"
    return ", ".join([*results, f"{time} on {devices}"])
