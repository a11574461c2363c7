"""Weights that callbacks and hooks edit, with or without a trace: all replicas go on with them."""

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from tiny_runs import Manual, Regression, a_loader, assert_close, batch_norm_net
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


AROUND_BATCHES = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_after_backward",
    "on_before_optimizer_step",
]
AROUND_EPOCHS = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]


@pytest.mark.parametrize("hook", [*AROUND_BATCHES, *AROUND_EPOCHS])
@pytest.mark.parametrize("edit", [clamp_data, clamp, rebind_data])
def test_edited_by_a_callback(assert_parity, hook, edit):
    assert_parity(Regression, callbacks=lambda: [LambdaCallback(**{hook: edit})])


HOOKS = [
    (base, hook)
    for base in (Regression, Manual)
    for hook in ("on_train_batch_start", "on_before_backward")
]


@pytest.mark.parametrize(("base", "hook"), [*HOOKS, (Regression, "on_before_zero_grad")])
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


def scale(module, factor):
    for parameter in module.parameters():
        parameter.data.mul_(factor)


EDITS = {
    "around the update": {"optimizer_step": around_the_update},
    "while saving": {"on_save_checkpoint": lambda self, checkpoint: clamp_data(None, self)},
    "with the scheduler": {
        "lr_scheduler_step": with_the_scheduler,
        "configure_optimizers": scheduled,
    },
    "in a hook decorated later": {"on_fit_start": decorated_on_the_instance},
    "for validation, and back": {
        "on_validation_start": lambda self: scale(self, 0.5),
        "on_validation_end": lambda self: scale(self, 2),
    },
    "between batches of validation": {"on_validation_batch_end": lambda self, *_: scale(self, 0.5)},
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_elsewhere(assert_parity, name):
    """What validation logs is compared, too."""
    saving = {
        "enable_checkpointing": True,
        "callbacks": lambda: [ModelCheckpoint(every_n_train_steps=2)],
    }
    kwargs = saving if name == "while saving" else {"val": True, "val_check_interval": 2}
    assert_parity(type("Module", (Regression,), EDITS[name]), **kwargs, check=False)


@pytest.mark.parametrize("stage", ["test", "predict"])
@pytest.mark.parametrize("when", ["start", "end"])
def test_edited_in_evaluation(trainer_on, stage, when):
    class Module(Regression):
        def test_step(self, batch, batch_idx):
            self.log("loss", self.loss(batch))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    def halve(self, *_):
        for parameter in self.parameters():
            parameter.data.mul_(0.5)

    def results(k):
        torch.manual_seed(1)
        module = type("Edited", (Module,), {f"on_{stage}_batch_{when}": halve})()
        trainer = trainer_on(k)
        return trainer.test(module, a_loader(), verbose=False), trainer.predict(module, a_loader())

    assert_close(results(2), results(1))


def test_a_callback_added_while_training(assert_parity):
    def add(trainer, module):
        if trainer.current_epoch == 1:
            trainer.callbacks.append(LambdaCallback(on_before_optimizer_step=clamp_data))

    assert_parity(Regression, callbacks=lambda: [LambdaCallback(on_train_epoch_start=add)])


AVERAGES = {
    "swa": lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1),
    "ema": lambda: EMAWeightAveraging(use_buffers=False),
    "ema with buffers": lambda: EMAWeightAveraging(use_buffers=True),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_lightnings_averages(assert_parity, name):
    kwargs = {"max_epochs": 4, "val": True, "limit_train_batches": 3, "sync_batchnorm": True}
    assert_parity(
        lambda: Regression(batch_norm_net()), callbacks=lambda: [AVERAGES[name]()], **kwargs
    )


def test_pruning(assert_parity):
    """A parameter becomes another one and a mask, then the mask changes."""

    prune = {
        "callbacks": lambda: [
            ModelPruning("l1_unstructured", parameter_names=["weight", "bias"], amount=0.2)
        ]
    }
    make = lambda: Regression(optimizer=lambda m: optim.Adam(m.parameters(), 0.01))  # noqa: E731
    modules = assert_parity(make, max_epochs=3, val=True, **prune)
    assert all((module.net[0].weight == 0).any() for module in modules)


@pytest.mark.parametrize("make", [Regression, Manual])
@pytest.mark.parametrize(
    ("hook", "step"), [("on_train_batch_start", 5), ("on_validation_start", 4)]
)
def test_layers_replaced_on_the_way(assert_parity, make, hook, step):
    def replace(trainer, module, *_):
        if trainer.global_step == step:
            torch.manual_seed(2)
            module.net[2] = nn.Linear(8, 3).double().to(module.device)
            trainer.optimizers[0].add_param_group({"params": list(module.net[2].parameters())})

    assert_parity(
        make, callbacks=lambda: [LambdaCallback(**{hook: replace})], val=True, max_epochs=3
    )
