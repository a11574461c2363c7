"""Weights now and then: replicas train apart, and every H updates they exchange how far they came.

Local SGD (McMahan et al., 2017; Stich, 2019) goes on from the mean of the replicas' weights. DiLoCo
(Douillard et al., 2023) takes their mean difference to the last common weights as a gradient, for a
step of SGD with Nesterov momentum. Local SGD is that step with `lr` 1 and no momentum.
"""

from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor


def nesterov(mean: Tensor, state: Any, lr: float = 1.0, momentum: float = 0.0) -> Tensor:
    """The outer step: from the mean difference, old minus new, to what is subtracted from old."""
    if momentum:
        state["velocity"] = mean + momentum * state.get("velocity", 0)
        mean = mean + momentum * state["velocity"]
    return lr * mean


def exchange_and_step(
    exchange: Any, outer: Callable[[Tensor, Any], Tensor], difference: Tensor, state: Any
) -> Generator[Any, Any, Tensor]:
    """An exchange whose result is to be subtracted from the common weights."""
    mean = yield from exchange(difference, state)
    return outer(mean, state.setdefault("outer", {}))
