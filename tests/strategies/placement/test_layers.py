"""Layers that are not registered, a teacher or an average of the weights: every replica has them on its own device."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow


def make_teacher() -> nn.Module:
    """With buffers, too; the same whenever it is made."""
    teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double().eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    teacher[1].running_mean += 0.5
    return teacher


class Held:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


HOLDERS = {
    "list": (lambda net: [net], lambda held: held[0]),
    "tuple": (lambda net: (net, 1), lambda held: held[0]),
    "dict": (lambda net: {"net": net}, lambda held: held["net"]),
    "object": (Held, lambda held: held.net),
    "object in a list": (lambda net: [Held(net)], lambda held: held[0].net),
    "namespace": (lambda net: SimpleNamespace(net=net), lambda held: held.net),
    "closure": (lambda net: lambda: net, lambda held: held()),
}


HOOKS = ["setup", "on_fit_start", "on_train_epoch_start"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_teachers_made_in_hooks(Regression, assert_parity, holder, hook):
    put, get = HOLDERS[holder]

    def make(self, *_, **__):
        self.held = put(make_teacher().to(self.trainer.strategy.root_device))

    def training_step(self, batch, batch_idx):
        X, _ = batch
        return self.loss(batch) + F.mse_loss(self.net(X), get(self.held)(X).detach())

    assert_parity(type("Module", (Regression,), {hook: make, "training_step": training_step}), (2,))


MOVES = [(holder, hook) for holder in ("list", "object", "closure") for hook in HOOKS]


@pytest.mark.parametrize(("holder", "where"), [*MOVES, ("list", "training_step"), ("object", "training_step")])
def test_teachers_of_init_moved_later(Regression, assert_parity, holder, where):
    put, get = HOLDERS[holder]

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.held = put(make_teacher())

        def training_step(self, batch, batch_idx):
            X, _ = batch
            if where == "training_step":
                get(self.held).to(self.device)
            return self.loss(batch) + F.mse_loss(self.net(X), get(self.held)(X).detach())

    def move(self, *_, **__):
        get(self.held).to(self.trainer.strategy.root_device)

    if where != "training_step":
        setattr(Module, where, move)
    assert_parity(Module, (2,))


class Average:
    """Of the weights of a net, to which it refers."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.of = copy.deepcopy(net), net

    def update(self) -> None:
        for average, parameter in zip(self.net.parameters(), self.of.parameters()):
            average.data.lerp_(parameter.data, 0.1)


@pytest.mark.parametrize("hook", ["__init__", "setup", "on_fit_start", "on_train_epoch_start"])
@pytest.mark.parametrize("in_a_list", [False, True])
def test_averages_of_the_weights(Regression, assert_parity, hook, in_a_list):
    """Updated after every step, and read in it with the net they are of."""

    class Module(Regression):
        def average(self) -> Average:
            return self.held[0] if in_a_list else self.held

        def on_train_batch_start(self, *_):
            self.average().net.to(self.device)

        def on_train_batch_end(self, *_):
            self.average().update()

        def training_step(self, batch, batch_idx):
            X, _ = batch
            average = self.average()
            target = average.net(X).detach()
            return self.loss(batch) + F.mse_loss(self.net(X), target) + 0.1 * average.of(X).square().mean()

    def make(self, *_: Any, **__: Any) -> None:
        if hook == "__init__":
            Regression.__init__(self)
        if not hasattr(self, "held"):
            average = Average(self.net)
            self.held = [average] if in_a_list else average

    setattr(Module, hook, make)
    one, *others = assert_parity(Module)
    for other in others:
        for average, expected in zip(other.average().net.parameters(), one.average().net.parameters()):
            torch.testing.assert_close(average.cpu(), expected.cpu(), rtol=1e-9, atol=1e-12)
            assert average.device == expected.device


def test_a_copy_of_the_net_in_a_list(Regression, assert_parity):
    """Made anew in every epoch: the later takes the place of what was there."""

    class Module(Regression):
        def on_train_epoch_start(self):
            self.before = [copy.deepcopy(self.net)]

        def training_step(self, batch, batch_idx):
            X, _ = batch
            return self.loss(batch) + F.mse_loss(self.net(X), self.before[0](X).detach())

    assert_parity(Module)


def test_a_hook_of_a_layer_with_a_tensor(Regression, assert_parity):
    """Registered after the replicas were made."""

    class Module(Regression):
        def on_fit_start(self):
            weights = torch.arange(1.0, 4.0, dtype=torch.float64, device=self.device)
            self.net[2].register_forward_hook(lambda layer, args, output: output * weights)

    assert_parity(Module)
