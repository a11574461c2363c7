"""Which calls count as waits, and which bytes go between devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated.watch import watched

CALLS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {  # with the waits and the bytes
    "a number": (lambda X: float(X[0]), 1, 0),
    "a copy to the CPU": (lambda X: X.cpu(), 1, 0),
    "from memory not pinned": (lambda X: torch.ones(3).to(X.device, non_blocking=True), 1, 0),
    "a number's copy": (lambda X: torch.tensor(3.0, device=X.device), 1, 0),
    "nonzero": (lambda X: X.nonzero(), 1, 0),
    "equal": (lambda X: torch.equal(X, X.clone()), 1, 0),
    "a mask": (lambda X: X[X > 0], 1, 0),
    "pinned": (lambda X: torch.ones(3).pin_memory().to(X.device, non_blocking=True), 0, 0),
    "between devices": (lambda X: X.to("sim:1"), 0, 12),
    "and its gradient": (lambda X: X.requires_grad_().to("sim:1").sum().backward(), 0, 24),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    call, num_waits, num_bytes = CALLS[name]
    X = torch.ones(3, device="sim:0")
    with watched() as seen:
        call(X)
    assert [*seen.waits.values()] == [1] * num_waits and seen.num_bytes == num_bytes
    assert all("test_watch.py" in place for _, place in seen.waits)
