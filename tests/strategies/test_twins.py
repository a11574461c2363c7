"""Layers, optimizers and methods kept in the module's plain attributes: a replica finds its own in their place."""

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("manual", [False, True])
def test_layers_added_in_hooks(Regression, assert_parity, hook, manual):
    """A teacher, which is a copy of the net as it is then."""

    def add(self):
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def drop(self):
        del self.teacher

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()
        if manual:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def make():
        module = type("Module", (Regression,), {hook: add, "training_step": training_step, "on_train_end": drop})()
        module.automatic_optimization = not manual
        return module

    assert_parity(make)


def test_optimizers_kept_on_the_module(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__(nn.Linear(6, 3))
            self.automatic_optimization = False

        def configure_optimizers(self):
            self.own = optim.SGD(self.parameters(), 0.1, momentum=0.9)
            self.by_name = {"schedule": optim.lr_scheduler.StepLR(self.own, 1, 0.9)}
            return [self.own], [self.by_name["schedule"]]

        def training_step(self, batch, batch_idx):
            assert self.own is self.optimizers().optimizer
            assert self.by_name["schedule"] is self.lr_schedulers()
            self.manual_backward(self.loss(batch))
            self.own.step()
            self.own.zero_grad()
            self.by_name["schedule"].step()

    assert_parity(Module)


def test_automatic_optimization_shows_the_optimizer(Regression, make_loader, make_trainer, engine):
    class Module(Regression):
        def configure_optimizers(self):
            optimizer = optim.SGD(self.parameters(), 0.1)
            schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def training_step(self, batch, batch_idx):
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            self.log("same", self.lr_schedulers().get_last_lr()[0])
            return self.loss(batch)

        def validation_step(self, batch, batch_idx):
            self.log("rate_then", self.trainer.optimizers[0].param_groups[0]["lr"])
            self.optimizers()

    trainer = make_trainer(devices=2, strategy=engine, max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Module(), make_loader(), make_loader())
    rates = trainer.callback_metrics
    assert rates["rate"] == rates["same"] == pytest.approx(0.1 * 0.5**3)
    assert rates["rate_then"] == pytest.approx(0.1 * 0.5**4)


class Stage:
    """Layers in a plain object, and a number hooks change."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers, self.factor = layers, 1.0


def test_layers_in_tuples_and_objects(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.pairs = [(self.net[0], self.net[1])]
            self.stages = {"last": Stage(self.net[2])}
            self.folder = Path("runs")  # an object without a `__dict__`

        def on_train_batch_start(self, *_):
            self.stages["last"].factor *= 1.1

        def training_step(self, batch, batch_idx):
            assert self.pairs[0][0] is self.net[0]
            assert self.stages["last"].layers[0] is self.net[2]
            return self.loss(batch) * self.stages["last"].factor

    assert_parity(Module)


def local_function(module):
    return lambda X, power=1: module.predict(X, power)


LOSSES = {
    "method": lambda module: module.predict,
    "partial": lambda module: partial(module.predict, power=2),
    "local function": local_function,
}


@pytest.mark.parametrize("hook", ["__init__", "on_fit_start"])
@pytest.mark.parametrize("name", LOSSES)
def test_methods_kept_on_the_module(Regression, assert_parity, name, hook):
    """They read what the step has set: on this replica, not on the original."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            if hook == "__init__":
                self.keep()

        def on_fit_start(self):
            if hook == "on_fit_start":
                self.keep()

        def keep(self):
            self.alone = LOSSES[name](self)
            self.by_name = {"predict": self.alone}

        def predict(self, X, power=1):
            return self.net(X) * self.scale**power

        def training_step(self, batch, batch_idx):
            X, y = batch
            self.scale = X[:, :1].sigmoid()  # one for every sample of the shard
            return F.mse_loss(self.alone(X), y) + F.mse_loss(self.by_name["predict"](X), y)

    assert_parity(Module)


class Average:
    """An exponential average of weights, as in many a training script."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.num_updates = copy.deepcopy(net), 0

    def update(self, net: nn.Module) -> None:
        self.num_updates += 1
        decay = 0.9 * (1 - math.exp(-self.num_updates))
        for own, other in zip(self.net.parameters(), net.parameters()):
            own.data.mul_(decay).add_(other.data, alpha=1 - decay)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_zero_grad"])
@pytest.mark.parametrize("place", ["object", "list"])
def test_layers_that_are_not_registered(Regression, assert_parity, place, hook):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.average = Average(self.net)
            self.held = self.average if place == "object" else [self.average.net]
            if place == "list":
                self.average = None

        def on_fit_start(self):
            teacher = self.held.net if place == "object" else self.held[0]
            teacher.to(self.device)

        def update(self, *_):
            if place == "object":
                self.average.update(self.net)
            else:
                for own, other in zip(self.held[0].parameters(), self.net.parameters()):
                    own.data.lerp_(other.data, 0.1)

        def training_step(self, batch, batch_idx):
            teacher = self.held.net if place == "object" else self.held[0]
            with torch.no_grad():
                target = teacher(batch[0])
            return self.loss(batch) + F.mse_loss(self.net(batch[0]), target)

        def state_dict(self, *args, **kwargs):
            teacher = self.held.net if place == "object" else self.held[0]
            return super().state_dict(*args, **kwargs) | {f"teacher.{k}": v for k, v in teacher.state_dict().items()}

    setattr(Module, hook, Module.update)
    assert_parity(Module)
