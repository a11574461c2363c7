"""Training in two processes is training on one device.

A test file has a table of such runs, `CASES`, and one test that calls `check` for each. Below are
modules and datasets of several files.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch.nn import functional as F
from torch.utils.data import IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.strategies.conftest import Net, assert_close, attempt, fit, make_strategy


class Case(NamedTuple):
    make: Callable[[], Any] = Net  # the module
    arguments: Callable[[], dict[str, Any]] = dict  # of `fit`: data, val, options of the Trainer
    said: str = ""  # in the one line of an error, if the run in two processes is refused
    is_for_one: bool = False  # test_refusals.py shows that two processes are refused
    expected: Callable[[], Any] | None = None  # weights and logged values, if not of one device
    rtol: float = 1e-10
    rtol_logged: float = 1e-10


def fit_case(module, name, **options):
    """Weights and logged values of a case of a test file, or its error as text."""
    case = import_module(module).CASES[name]
    return attempt(fit, case.make, **{**case.arguments(), **options})


def check(module, name, in_two_processes):
    """Compare the runs of a case in two processes and in one, or find its error in both of two."""
    case = import_module(module).CASES[name]
    runs = [] if case.is_for_one else in_two_processes(fit_case, module, name)
    if case.said:
        check_refused(runs, case.said)
        return
    runs.append(fit_case(module, name, strategy=make_strategy()))
    expected = case.expected() if case.expected else fit_case(module, name)
    for found in runs:
        assert not isinstance(found, str), found
        assert_close(found[0], expected[0], case.rtol)
        # a value of one step is that of a part of the batch
        logged = [
            {k: v for k, v in each[1].items() if k[-5:] != "_step"} for each in (found, expected)
        ]
        assert_close(*logged, max(case.rtol, case.rtol_logged))


def check_refused(runs, said):
    for found in runs:
        assert said in found and "\n" not in found, found


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Weighted(Net):
    def training_step(self, batch, batch_idx):
        is_counted = batch[1] != 2
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        loss = (losses * is_counted).sum() / is_counted.sum()  # for 0 / 0, NaN gradients, too
        assert loss.isnan() == (is_counted.sum() == 0)
        return {"loss": loss, "weight": is_counted.sum()}


class Logs(Net):
    def __init__(self):
        super().__init__()
        self.accuracy, self.train_accuracy = (
            MulticlassAccuracy(3, average="micro") for _ in range(2)
        )
        self.metrics = MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)])

    def training_step(self, batch, batch_idx):
        assert self.device == batch[0].device
        loss = self.loss(batch)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.train_accuracy(self.net(batch[0]), batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["loss"].ndim == 0 and outputs["loss"].device == self.device

    def evaluate(self, batch, kind):
        loss = self.loss(batch)
        self.log(f"{kind}_loss", loss)
        self.log(f"{kind}_loss_synced", loss, sync_dist=True)
        self.log(f"{kind}_number", float(batch[0][:, 0].sum()), reduce_fx="sum")
        self.log(f"{kind}_max", batch[0].max(), reduce_fx="max")
        self.log(f"{kind}_weighed", batch[0][:, 0].mean(), batch_size=len(batch[0]))
        self.accuracy(self.net(batch[0]), batch[1])
        self.log(f"{kind}_accuracy", self.accuracy)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluate(batch, "val")
        self.metrics.update(self.net(batch[0]), batch[1])
        self.log("val", self.loss(batch), on_step=True, on_epoch=True)
        if batch_idx > 1:
            self.log("val_some", self.loss(batch))

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        yield from self.items
