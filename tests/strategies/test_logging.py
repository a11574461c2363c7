"""Logged values of an evaluation are means over all samples; in training those of a shard."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.cases import Case, Logs, Stream, check
from tests.strategies.conftest import Net, assert_close, new_trainer, samples


def val_loaders():
    return [DataLoader(samples(59, 5), 7), DataLoader(samples(23, 6), 4)]


class Plateau(Logs):
    """A rate that falls by what one process would otherwise see alone."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    def on_train_epoch_end(self):
        self.log("rate", self.optimizers().param_groups[0]["lr"])


class InHooks(Logs):
    def on_validation_batch_end(self, outputs, batch, *args):
        self.log("val_hook", batch[0][:, 0].mean(), sync_dist=True)


class TwoStreams(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


class EvaluatesBoth(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch["a"]) + self.loss(batch["b"]))


class EvaluatesByMetric(Net):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        for each in batch.values():
            self.mean.update(each[0][:, 0])
        self.log("mean", self.mean)


def both(size):
    """Batches of two loaders: with 5 samples in the first one, shards of 3 beside shards of 2."""
    return CombinedLoader(
        {"a": DataLoader(samples(20), size), "b": DataLoader(samples(20), 4)}, "min_size"
    )


CASES = {
    "several loaders": Case(Logs, lambda: {"val": val_loaders()}, rtol_logged=1e-6),
    "plateau": Case(Plateau, lambda: {"val": val_loaders()[0], "max_epochs": 6}, rtol_logged=1e-6),
    "in hooks": Case(InHooks, lambda: {"val": val_loaders()[0]}, rtol_logged=1e-6),
    "two loaders": Case(EvaluatesBoth, lambda: {"val": both(4)}),
    "other shares": Case(
        EvaluatesBoth, lambda: {"val": both(5)}, "share of a batch differs between loaders"
    ),
    "other shares, a metric": Case(EvaluatesByMetric, lambda: {"val": both(5)}, rtol_logged=1e-6),
    "streams": Case(TwoStreams, lambda: {"val": [DataLoader(Stream([*samples()][:30]), 10)] * 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_means_over_all_samples(name, in_two_processes):
    check(__name__, name, in_two_processes)


def evaluate():
    torch.manual_seed(0)
    trainer, module = new_trainer(), Logs().double()
    # of one batch, and the first evaluation of its Trainer: 2 samples and 1
    few = new_trainer().test(module, DataLoader(samples(3, 7), 4), verbose=False)[0]
    first = trainer.validate(module, val_loaders()[0], verbose=False)[0]
    first |= {f"few_{name}": value for name, value in few.items()}
    return {**first, **trainer.test(module, val_loaders()[1], verbose=False)[0]}


def test_validate_and_test_alone(in_two_processes):
    expected = evaluate()
    assert expected.keys() > {"val_loss", "test_loss", "test_max"}
    for found in in_two_processes(evaluate):
        assert_close(found, expected, 1e-5)
