"""What tests of compiled updates share: a compiler that is quick and counts, a network, and steps."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import Optimizer

from lightning_mgpu import compiled_step


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs that are compiled; for speed they are not made into kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_step.torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


@pytest.fixture
def make_net() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))

    return make


@pytest.fixture
def steps() -> Callable[..., list[Any]]:
    """`count` steps, each of its own batch and learning rate; what `optimizer.step` returned."""

    def run(net: nn.Module, optimizer: Optimizer, scheduler: Any, count: int, seed: int = 0) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        losses = []
        for _ in range(count):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = net(torch.randn(4, 6, generator=generator)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
            scheduler.step()
        return losses

    return run
