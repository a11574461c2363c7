"""Weights that callbacks and hooks edit, with and without a trace: every replica goes on with the edited ones."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from tiny_runs import Manual, Regression, batch_norm_net
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


def clamp_data(trainer, module, *_):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def clamp(trainer, module, *_):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.3, 0.3)


def rebind_data(trainer, module, *_):
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.95


AROUND_BATCHES = ["on_train_batch_start", "on_train_batch_end", "on_after_backward", "on_before_optimizer_step"]
AROUND_EPOCHS = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", [*AROUND_BATCHES, *AROUND_EPOCHS])
@pytest.mark.parametrize("edit", [clamp_data, clamp, rebind_data])
def test_edited_by_a_callback(assert_parity, hook, edit):
    assert_parity(Regression, callbacks=lambda: [LambdaCallback(**{hook: edit})])


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        *((base, hook) for base in (Regression, Manual) for hook in ("on_train_batch_start", "on_before_zero_grad")),
        (Regression, "on_before_backward"),
    ],
)
def test_edited_by_the_module(assert_parity, hook, base):
    """Between a loss and its gradient, too, where torch forbids an edit with a trace."""
    assert_parity(type("Module", (base,), {hook: lambda self, *_: clamp_data(None, self)}))


def around_the_update(self, *args, **kwargs):
    Regression.optimizer_step(self, *args, **kwargs)
    clamp_data(None, self)


def with_the_scheduler(self, scheduler, metric):
    scheduler.step()
    clamp_data(None, self)


def scheduled(self):
    optimizer = optim.SGD(self.parameters(), 0.1)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2), "interval": "step"}]


def decorated_on_the_instance(self):
    inner = self.on_train_batch_end
    self.on_train_batch_end = lambda *args: (inner(*args), clamp_data(None, self))


EDITS = {
    "around the update": {"optimizer_step": around_the_update},
    "while saving": {"on_save_checkpoint": lambda self, checkpoint: clamp_data(None, self)},
    "with the scheduler": {"lr_scheduler_step": with_the_scheduler, "configure_optimizers": scheduled},
    "in a hook decorated later": {"on_fit_start": decorated_on_the_instance},
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_elsewhere(assert_parity, name):
    saving = {"enable_checkpointing": True, "callbacks": lambda: [ModelCheckpoint(every_n_train_steps=2)]}
    make = type("Module", (Regression,), EDITS[name])
    assert_parity(make, **(saving if name == "while saving" else {}), check=False)


def test_a_callback_added_while_training(assert_parity):
    class Adds(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.callbacks.append(LambdaCallback(on_before_optimizer_step=clamp_data))

    assert_parity(Regression, callbacks=lambda: [Adds()])


class Average(Callback):
    """A moving average of the weights, swapped in for validation and put back afterwards."""

    def __init__(self, in_data):
        self.in_data = in_data

    def write(self, module, values):
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), values):
                (parameter.data if self.in_data else parameter).copy_(value)

    def on_fit_start(self, trainer, module):
        self.average = [parameter.detach().clone() for parameter in module.parameters()]

    def on_train_batch_end(self, trainer, module, *_):
        for average, parameter in zip(self.average, module.parameters()):
            average.lerp_(parameter.detach(), 0.2)

    def on_validation_start(self, trainer, module):
        self.backup = [parameter.detach().clone() for parameter in module.parameters()]
        self.write(module, self.average)

    def on_validation_end(self, trainer, module):
        self.write(module, self.backup)


@pytest.mark.parametrize("in_data", [False, True])
def test_an_average_for_validation(assert_parity, in_data):
    """The losses of validation are compared, too."""
    assert_parity(Regression, callbacks=lambda: [Average(in_data)], val=True, val_check_interval=2)


AVERAGES = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
    "ema": lambda: EMAWeightAveraging(use_buffers=False),
    "ema with buffers": lambda: EMAWeightAveraging(use_buffers=True),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_lightnings_averages(assert_parity, name):
    kwargs = {"max_epochs": 4, "val": True, "limit_train_batches": 3, "sync_batchnorm": True}
    assert_parity(lambda: Regression(batch_norm_net()), callbacks=lambda: [AVERAGES[name]()], **kwargs)


def test_pruning(assert_parity):
    """A parameter becomes another one and a mask, then the mask changes."""

    def prune():
        return [ModelPruning("l1_unstructured", parameter_names=["weight", "bias"], amount=0.2)]

    make = lambda: Regression(optimizer=lambda m: optim.Adam(m.parameters(), 0.01))  # noqa: E731
    modules = assert_parity(make, callbacks=prune, max_epochs=3, val=True, enable_checkpointing=False)
    assert all((module.net[0].weight == 0).any() for module in modules)


class Replace(Callback):
    """Puts a new last layer in place of the old one when a hook is called for the n-th time."""

    def __init__(self, hook, n):
        self.num_calls, self.n = 0, n
        setattr(self, hook, self.count)

    def count(self, trainer, module, *_):
        self.num_calls += 1
        if self.num_calls == self.n:
            torch.manual_seed(2)
            module.net[2] = nn.Linear(8, 3).double().to(module.device)
            trainer.optimizers[0].add_param_group({"params": list(module.net[2].parameters())})


@pytest.mark.parametrize("make", [Regression, Manual])
@pytest.mark.parametrize(("hook", "n"), [("on_train_batch_start", 6), ("on_validation_start", 1)])
def test_layers_replaced_on_the_way(assert_parity, make, hook, n):
    assert_parity(make, callbacks=lambda: [Replace(hook, n)], val=True, max_epochs=3)


class Follows(Regression):
    """Has an average of its weights as a layer, as BYOL and DINO do, which is updated after every batch."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + (self.net(batch[0]) - self.average(batch[0])).square().mean()

    def follow(self, *_):
        with torch.no_grad():
            for average, parameter in zip(self.average.parameters(), self.net.parameters()):
                average.lerp_(parameter, 0.5)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_zero_grad"])
def test_an_average_that_is_a_layer(assert_parity, hook):
    assert_parity(type("Module", (Follows,), {hook: Follows.follow}))
