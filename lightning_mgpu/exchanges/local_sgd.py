"""Weights now and then: replicas train apart, and every H updates they exchange how far they came.

Local SGD (McMahan et al., 2017; Stich, 2019) goes on from the mean of the replicas' weights. DiLoCo
(Douillard et al., 2023) takes their mean difference to the last common weights as a gradient, for a
step of SGD with Nesterov momentum. Local SGD is that step with `lr` 1 and no momentum.
"""

from collections.abc import Generator
from typing import Any

from torch import Tensor


def outer_step(
    exchange: Any, lr: float, momentum: float, difference: Tensor, state: Any
) -> Generator[Any, Any, Tensor]:
    """An exchange whose result is to be subtracted from the common weights."""
    step = yield from exchange(difference, state)
    if momentum:
        velocity = state["velocity"] = step + momentum * state.get("velocity", 0)
        step = step + momentum * velocity
    return lr * step
