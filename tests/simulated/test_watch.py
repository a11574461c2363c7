"""Which calls count as waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated.watch import watched

WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda X: float(X[0]),
    "a copy to the CPU": lambda X: X.cpu(),
    "a copy from memory not pinned": lambda X: torch.ones(3).to(X.device, non_blocking=True),
    "a number's copy": lambda X: torch.tensor(3.0, device=X.device),
    "nonzero": lambda X: X.nonzero(),
    "equal": lambda X: torch.equal(X, X.clone()),
    "a mask": lambda X: X[X > 0],
}
GOES_ON: dict[str, Callable[[Tensor], Any]] = {
    "a pinned copy": lambda X: torch.ones(3).pin_memory().to(X.device, non_blocking=True),
    "a copy between devices": lambda X: X.to("sim:1"),
    "and its gradient": lambda X: X.requires_grad_().to("sim:1").sum().backward(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits(name: str) -> None:
    X = torch.ones(3, device="sim:0")
    with watched() as seen:
        WAITS[name](X)
    assert list(seen.waits.values()) == [1] and "test_watch.py" in next(iter(seen.waits))[1]


@pytest.mark.parametrize("name", GOES_ON)
def test_goes_on(name: str) -> None:
    X = torch.ones(3, device="sim:0")
    with watched() as seen:
        GOES_ON[name](X)
    assert not seen.waits
    assert seen.num_bytes == {"a copy between devices": 12, "and its gradient": 24}.get(name, 0)
