"""An optimizer's update compiled: the same weights, whatever a scheduler does, and nobody notices but the clock."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.optim import Muon
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_mgpu.callbacks import compiled_step
from lightning_mgpu.callbacks.compiled_step import compile_step
from lightning_mgpu.runs.errors import UsageError

OPTIMIZERS = {
    "SGD": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": partial(AdamW, amsgrad=True),
    "Muon": partial(Muon, ns_steps=3, nesterov=True),
}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the graphs that are compiled; for speed they are not made into kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_step.torch, "compile", partial(torch.compile, backend=counter))
    return counter


def steps(net: nn.Module, optimizer: Optimizer, count: int) -> list[Any]:
    """`count` steps, each of its own batch and learning rate; what `optimizer.step` returned."""
    generator = torch.Generator().manual_seed(0)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_update_is_the_update_and_goes_on_with_its_state(
    name: str, compiler: CompileCounterWithBackend
) -> None:
    nets = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        nets.append(net := nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.1)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        if is_compiled:
            compile_step(optimizer)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a scheduler warns of steps that it did not see
            losses = steps(net, optimizer, 12)
        assert calls == ["before", "after"] * 12
        assert all(isinstance(loss, Tensor) and loss.requires_grad for loss in losses)
        assert type(optimizer.param_groups[0]["lr"]) is float  # for schedulers, loggers and checkpoints
        assert isinstance(optimizer, Optimizer) and type(optimizer).__name__ == name
        other = OPTIMIZERS[name](net.parameters(), lr=0.3)
        if not is_compiled:  # either goes on with the other's state
            compile_step(other)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(net, other, 3)
    for first, second in zip(*(net.parameters() for net in nets)):  # Muon multiplies in bfloat16
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-2 if name == "Muon" else 1e-5)
    assert 1 <= compiler.frame_count <= 6  # for two optimizers, not one for each of the rates


def test_double_precision_has_a_rate_in_double_precision(compiler: CompileCounterWithBackend) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = SGD([weight], lr=0.1)
    compile_step(optimizer)
    optimizer.step()
    assert weight.item() == -0.1


class OfOnesOwn(SGD):
    pass


@pytest.mark.parametrize("optimizer", [partial(Adam, fused=True), LBFGS, OfOnesOwn])
def test_what_may_do_more_is_refused(optimizer: Callable) -> None:
    with pytest.raises(UsageError, match="leave it out for this"):
        compile_step(optimizer(nn.Linear(6, 5).parameters()))
