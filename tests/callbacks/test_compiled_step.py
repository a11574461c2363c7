"""An optimizer's update compiled: the same weights, whatever a scheduler does, and nobody notices but the clock."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from timm.optim import Muon
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mgpu.callbacks import FastModel, compiled_step
from lightning_mgpu.callbacks.compiled_step import compile_step
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.errors import UsageError
from lightning_mgpu.models import LeNet

OPTIMIZERS = {
    "SGD": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": Adam,
    "AdamW(amsgrad=True)": partial(AdamW, amsgrad=True),
    "Muon": partial(Muon, ns_steps=3, nesterov=True),
}
DEVICES = {"auto": 1, "dp": 2, "manual_allreduce": 2}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the graphs that are compiled; for speed they are not made into kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_step.torch, "compile", partial(torch.compile, backend=counter))
    return counter


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def steps(net: nn.Module, optimizer: Optimizer, scheduler: Any, count: int, seed: int = 0) -> list[Any]:
    """`count` steps, each of its own batch and learning rate; what `optimizer.step` returned."""
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


def assert_close(nets: list[nn.Module], name: str) -> None:
    for parameters in zip(*(net.parameters() for net in nets)):
        for parameter in parameters[1:]:  # Muon multiplies in bfloat16
            torch.testing.assert_close(parameter, parameters[0], rtol=1e-4, atol=1e-2 if name == "Muon" else 1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_update_is_the_update(name: str, compiler: CompileCounterWithBackend) -> None:
    nets = [make_net(), make_net()]
    for net in nets:
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        if net is nets[1]:
            compile_step(optimizer)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a scheduler warns of steps that it did not see
            losses = steps(net, optimizer, scheduler, 12)
            steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 1)  # one made afterwards
        assert calls == ["before", "after"] * 13
        assert all(isinstance(loss, Tensor) and loss.requires_grad for loss in losses)
        assert type(optimizer.param_groups[0]["lr"]) is float  # for schedulers, loggers and checkpoints
        assert isinstance(optimizer, Optimizer) and type(optimizer).__name__ == name.partition("(")[0]
    assert_close(nets, name)
    assert 1 <= compiler.frame_count <= 3  # not one for each of thirteen rates


def test_kernels_are_the_update() -> None:
    torch._dynamo.reset()
    nets = [make_net(), make_net()]
    for net in nets:
        optimizer = Adam(net.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if net is nets[1]:
            compile_step(optimizer)
        steps(net, optimizer, scheduler, 4)
    assert_close(nets, "Adam")


@pytest.mark.parametrize("name", ["Adam", "Muon"])
def test_states_go_on_elsewhere(name: str, compiler: CompileCounterWithBackend) -> None:
    """In a checkpoint is what the optimizer keeps without the compiler: either goes on with the other's."""
    nets = [make_net() for _ in range(3)]
    for i, net in enumerate(nets):
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.1)
        if i != 1:
            compile_step(optimizer)
        steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 3)
        other = OPTIMIZERS[name](net.parameters(), lr=0.3)
        if i != 0:
            compile_step(other)  # before the state is there, as a run that is resumed does
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(net, other, LambdaLR(other, lambda step: 1.0), 3, seed=1)
        assert other.param_groups[0]["lr"] == 0.1
    assert_close(nets, name)


def test_double_precision_has_a_rate_in_double_precision(compiler: CompileCounterWithBackend) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    optimizer = SGD([weight], lr=0.1)
    compile_step(optimizer)
    optimizer.step()
    assert weight.item() == -0.1


class OfOnesOwn(SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (partial(Adam, fused=True), "of Adam by itself: leave fused and foreach out"),
        (partial(Adam, foreach=True), "leave fused and foreach out"),
        (LBFGS, "leave it out for LBFGS"),
        (OfOnesOwn, "for the optimizers of torch and timm .* leave it out for OfOnesOwn"),
    ],
)
def test_what_may_do_more_is_refused(optimizer: Callable, says: str) -> None:
    with pytest.raises(UsageError, match=f"compile_optimizer=true .*{says}"):
        compile_step(optimizer(make_net().parameters()))


@pytest.mark.parametrize("strategy", DEVICES)
def test_it_trains_the_same_under_every_strategy(
    strategy: str, make_trainer: Callable, root: Path, compiler: CompileCounterWithBackend
) -> None:
    class Compiled(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert all("compiled_from" in vars(type(optimizer)) for optimizer in trainer.strategy.optimizers)

    def train(fast: bool, **options: Any) -> LeNet:
        torch.manual_seed(0)
        model = LeNet(partial(SGD, lr=0.1, momentum=0.9), partial(OneCycleLR, max_lr=0.1, cycle_momentum=False))
        images = FashionMNIST(root=str(root), batch_size=64, val_size=101)
        callbacks = [FastModel(compile_optimizer=fast), *([Compiled()] * fast)]
        make_trainer(max_steps=8, callbacks=callbacks, **options).fit(model, images)
        return model

    fast = train(True, strategy=strategy, devices=DEVICES[strategy])
    assert_close([train(False), fast], "SGD")
    assert 1 <= compiler.frame_count <= 4
