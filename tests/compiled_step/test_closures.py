"""What a compiled update may do with its closure and its arguments, and what is refused."""

import copy
import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_mgpu import compiled_step
from lightning_mgpu.callbacks import FastModel
from lightning_mgpu.compiled_step import compile_step
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.errors import UsageError


class Polyak(SGD):
    """Its steps are as long as the loss it gets from the closure."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * loss * parameter.grad)
        return loss


class Twice(SGD):
    def step(self, closure: Any) -> Any:
        super().step(closure)
        return super().step(closure)


class Ahead(SGD):
    """Moves before it asks for gradients."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)
        return super().step(closure)


class AheadUnseen(SGD):
    """The same, uncounted by autograd."""

    def step(self, closure: Any) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.9)
        return super().step(closure)


def test_an_update_may_look_at_the_loss(
    compiler: CompileCounterWithBackend, make_net: Callable, steps: Callable
) -> None:
    plain = make_net()
    fast = copy.deepcopy(plain)
    for net in (plain, fast):
        optimizer = Polyak(net.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        if net is fast:
            compile_step(optimizer)
        steps(net, optimizer, scheduler, 6)
    for a, b in zip(plain.parameters(), fast.parameters()):
        torch.testing.assert_close(b, a)
    assert compiler.frame_count == 1


@pytest.mark.parametrize("optimizer", [Twice, Ahead, AheadUnseen])
def test_an_update_that_evaluates_the_loss_is_refused(
    optimizer: type[Optimizer], make_net: Callable, steps: Callable
) -> None:
    net = make_net()
    own = optimizer(net.parameters(), lr=0.1)
    scheduler = LambdaLR(own, lambda step: 1.0)
    compile_step(own)
    for _ in range(2):  # somebody may have caught the first
        with pytest.raises(UsageError, match=f"{optimizer.__name__} evaluates the loss within its update"):
            steps(net, own, scheduler, 1)


def test_a_step_of_somebody_elses_is_refused(make_net: Callable) -> None:
    SGD(make_net().parameters())  # from now on torch's hooks are around the step of the class

    class Decorated(SGD):
        step = functools.wraps(SGD.step)(lambda self, closure=None: SGD.step(self, closure))

    patched = SGD(make_net().parameters(), lr=0.1)
    patched.step = lambda closure=None: None
    for optimizer in (patched, Decorated(make_net().parameters(), lr=0.1)):
        with pytest.raises(UsageError, match=f"the step of {type(optimizer).__name__} was replaced by another"):
            compile_step(optimizer)
    LambdaLR(patched := SGD(make_net().parameters(), lr=0.1), lambda step: 1.0)
    compile_step(patched)  # by a scheduler


def test_other_arguments_reach_the_update(compiler: CompileCounterWithBackend, make_net: Callable) -> None:
    class Scaled(SGD):
        def step(self, closure: Any = None, scale: float = 0.0) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(scale)

    net = make_net()
    optimizer = Scaled(net.parameters(), lr=0.1)
    compile_step(optimizer)
    before = net[0].bias.detach().clone()
    optimizer.step(scale=2.0)
    optimizer.step(None, 2.0)
    torch.testing.assert_close(net[0].bias, before + 4.0)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (partial(Adam, fused=True), "Adam with fused=true is one kernel already"),
        (partial(Adam, foreach=True), "leave foreach=true out"),
        (LBFGS, "LBFGS evaluates the loss"),
    ],
)
def test_nothing_to_compile_is_refused(optimizer: Callable, says: str, make_net: Callable) -> None:
    with pytest.raises(UsageError, match=says):
        compile_step(optimizer(make_net().parameters()))


def test_what_the_compiler_cannot_take_ends_in_one_line(make_net: Callable, steps: Callable) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such instruction\nand many lines more")

    net = make_net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_step.torch, "compile", partial(torch.compile, backend=broken))
        compile_step(optimizer)
    with pytest.raises(UsageError, match=r"SGD fails while it is compiled .*no such instruction.*leave the option out"):
        steps(net, optimizer, LambdaLR(optimizer, lambda step: 1.0), 2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_it_needs_a_compiler(make_trainer: Callable, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    trainer = make_trainer(callbacks=[FastModel(compile_optimizer=True)])
    with pytest.raises(UsageError, match=r"compile_optimizer=true needs a C\+\+ compiler"):
        trainer.fit(LeNet(), FashionMNIST(root=str(root), batch_size=64, val_size=101))
