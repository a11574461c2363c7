"""What `self.log` is given in a step: on several devices one's values, in every step and epoch."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tiny_runs import MANUAL, Regression
from torch.utils.data import DataLoader, TensorDataset

# what both strategies share
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)

WHEN = [
    {"on_step": True, "on_epoch": False},
    {"on_step": False, "on_epoch": True},
    {"on_step": True, "on_epoch": True},
]


@pytest.mark.parametrize("when", WHEN, ids=str)
def test_means(assert_logs_alike, when):
    """Of batches whose sizes are given, too: samples and tokens add up."""

    def step(module, stage, X, y, batch_idx):
        module.log(f"{stage}_float", X.mean().item(), **when)
        module.log(f"{stage}_number", 3, **when)
        module.log(f"{stage}_one_element", X.mean().reshape(1), **when)
        module.log_dict({f"{stage}_a": X.mean(), f"{stage}_b": X.mean() * 0 + batch_idx}, **when)
        for name, batch_size in (("samples", len(X)), ("tokens", X.numel())):
            module.log(f"{stage}_{name}", X.mean(), batch_size=batch_size, **when)

    assert_logs_alike(step)


@pytest.mark.parametrize("functions", [("sum", "max", "min"), (torch.sum, torch.max, torch.min)])
def test_other_reductions(assert_logs_alike, functions):
    def step(module, stage, X, y, batch_idx):
        values = ((y == 0).sum(), X.max(), X.min())
        for name, value, reduce_fx in zip(("sum", "max", "min"), values, functions):
            module.log(f"{stage}_{name}", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            module.log(f"{stage}_{name}_number", value.item(), False, True, False, True, reduce_fx)

    assert_logs_alike(step)


def changed_after_logging(module, stage, X, y, batch_idx):
    value = X.mean()
    module.log(f"{stage}_value", value, on_epoch=True)
    value += 1


def logged_by_some_replicas(module, stage, X, y, batch_idx):
    """One device, too, logs such a value only for batches that have it."""
    if (rows := X[y == 0]).numel():
        module.log(f"{stage}_rare", rows.mean(), batch_size=len(rows), on_epoch=True)


@pytest.mark.parametrize("step", [changed_after_logging, logged_by_some_replicas])
def test_ways_to_log(assert_logs_alike, step):
    assert_logs_alike(step, at_end=lambda module, stage: module.log(f"{stage}_end", 1.5))


def test_several_dataloaders(assert_logs_alike, logged):
    def step(module, stage, X, y, batch_idx):
        module.log(f"{stage}_each", X.mean(), on_epoch=True)

    assert_logs_alike(step, num_loaders=2)
    assert any("dataloader_idx_1" in name for name in logged(2, step, num_loaders=2)[-1])


def test_a_function_that_keeps_the_modules_log(assert_parity):
    """`assert_parity` compares `callback_metrics`."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.my_log = partial(self.log, on_step=False, on_epoch=True)

        def loss(self, batch):
            self.my_log("inputs", batch[0].mean())
            return super().loss(batch)

    assert all("inputs" in module.trainer.callback_metrics for module in assert_parity(Module))


def test_where_lightning_logs_nothing(trainer_on):
    """It says so in the step, which may go on."""

    class Module(Regression):
        def predict_step(self, batch, batch_idx):
            with pytest.raises(
                MisconfigurationException, match="result collection is not registered"
            ):
                self.log("x", 1.0)
            return batch[0]

    X = torch.arange(4.0)
    [made] = trainer_on(2).predict(Module(), DataLoader(TensorDataset(X), 4))
    assert made.tolist() == [0, 1, 2, 3]
