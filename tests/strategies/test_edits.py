"""Weights that callbacks edit, with and without a trace: averages, clamps, swaps for validation."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn, optim

pytestmark = pytest.mark.slow


class Average(Callback):
    """A moving average of the weights, swapped in for validation and put back afterwards."""

    def __init__(self, in_data, start="on_validation_epoch_start", end="on_validation_epoch_end"):
        self.in_data, self.backup = in_data, None
        setattr(self, start, self.swap_in)
        setattr(self, end, self.swap_out)

    def write(self, module, values):
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), values):
                (parameter.data if self.in_data else parameter).copy_(value)

    def on_fit_start(self, trainer, module):
        self.average = [parameter.detach().clone() for parameter in module.parameters()]

    def on_train_batch_end(self, trainer, module, *_):
        for average, parameter in zip(self.average, module.parameters()):
            average.lerp_(parameter.detach(), 0.2)

    def swap_in(self, trainer, module):
        self.backup = [parameter.detach().clone() for parameter in module.parameters()]
        self.write(module, self.average)

    def swap_out(self, trainer, module):
        self.write(module, self.backup)


@pytest.mark.parametrize("in_data", [False, True])
@pytest.mark.parametrize(
    "hooks", [("on_validation_epoch_start", "on_validation_epoch_end"), ("on_validation_start", "on_validation_end")]
)
def test_average_for_validation(Regression, assert_parity, in_data, hooks):
    modules = assert_parity(Regression, callbacks=lambda: [Average(in_data, *hooks)], val=True, val_check_interval=2)
    losses = [module.trainer.callback_metrics["val_loss"] for module in modules]
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-10, atol=0)


@pytest.mark.parametrize("in_data", [False, True])
def test_average_written_every_step(Regression, assert_parity, in_data):
    class Slow(Average):
        def on_train_batch_end(self, trainer, module, *_):
            super().on_train_batch_end(trainer, module)
            self.write(module, self.average)

    assert_parity(Regression, callbacks=lambda: [Slow(in_data)])


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_start",
    ],
)
def test_weights_clamped_by_a_callback(Regression, assert_parity, hook):
    def clamp(trainer, module, *_):
        for parameter in module.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    assert_parity(Regression, callbacks=lambda: [LambdaCallback(**{hook: clamp})])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
def test_a_callback_added_while_training(Regression, assert_parity, hook):
    def clamp(trainer, module, *_):
        for parameter in module.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    class Adds(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.callbacks.append(LambdaCallback(**{hook: clamp}))

    assert_parity(Regression, callbacks=lambda: [Adds()])


def test_weights_clamped_while_saving(Regression, assert_parity):
    class Module(Regression):
        def on_save_checkpoint(self, checkpoint):
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

    def callbacks():
        return [ModelCheckpoint(every_n_train_steps=2)]

    assert_parity(Module, callbacks=callbacks, enable_checkpointing=True)


def test_weights_clamped_by_the_module(Regression, assert_parity):
    class InStep(Regression):
        def training_step(self, batch, batch_idx):
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)
            return self.loss(batch)

    class AroundStep(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

    # of a replica that has no samples (the last batch) nobody clamps the weights
    assert_parity(InStep)
    assert_parity(AroundStep, check=False)


@pytest.mark.parametrize("norm", [False, True])
def test_stochastic_weight_averaging(Regression, assert_parity, norm):
    def make():
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 3)]
        return Regression(nn.Sequential(*layers))

    callbacks = lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)]  # noqa: E731
    assert_parity(make, callbacks=callbacks, max_epochs=4, sync_batchnorm=norm, limit_train_batches=3)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("kind", [WeightAveraging, EMAWeightAveraging])
def test_weight_averaging(Regression, assert_parity, kind, use_buffers):
    def make():
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        return Regression(net, lambda m: optim.SGD(m.parameters(), 0.1, momentum=0.9))

    modules = assert_parity(
        make, callbacks=lambda: [kind(use_buffers=use_buffers)], val=True, sync_batchnorm=True, limit_train_batches=3
    )
    losses = [module.trainer.callback_metrics["val_loss"] for module in modules]
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-10, atol=0)


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step"])
def test_buffers_the_backward_pass_needs(Regression, assert_parity, hook):
    """Between the passes replicas get the weights a hook may have edited, and no buffers: autograd has kept those."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

        def loss(self, batch):
            return self.criterion(self.net(batch[0]), (batch[1] > 0).double())

    def clamp(self, *_):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    assert_parity(type("Edits", (Module,), {hook: clamp}))
