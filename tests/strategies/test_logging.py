"""Logged values of an evaluation are means over all samples; in training those of a shard."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    new_trainer,
    run_in_processes,
    samples,
)


def val_loaders() -> list[DataLoader]:
    """The last batches have 1 and 3 samples more than a whole number of shards."""
    return [DataLoader(samples(59, 5), 7), DataLoader(samples(23, 6), 4)]


class Logs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def evaluate(self, batch: Any, kind: str) -> None:
        loss = self.loss(batch)
        self.log(f"{kind}_loss", loss)
        self.log(f"{kind}_loss_synced", loss, sync_dist=True)
        self.log(f"{kind}_number", float(batch[0][:, 0].sum()), reduce_fx="sum")
        self.log(f"{kind}_max", batch[0].max(), reduce_fx="max")
        self.log(f"{kind}_weighed", batch[0][:, 0].mean(), batch_size=len(batch[0]))
        self.accuracy(self.net(batch[0]), batch[1])
        self.log(f"{kind}_accuracy", self.accuracy)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, "val")
        self.log("val", self.loss(batch), on_step=True, on_epoch=True)
        if batch_idx > 1:
            self.log("val_some", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate(batch, "test")


class Plateau(Logs):
    """A rate that falls by what one process would otherwise see alone."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    def on_train_epoch_end(self) -> None:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


class InHooks(Logs):
    """Values that hooks log need `sync_dist`."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, *args: Any) -> None:
        self.log("val_hook", batch[0][:, 0].mean(), sync_dist=True)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from (samples()[i] for i in range(30))


class TwoStreams(Net):
    """Two validation loaders of unknown length: Lightning reads a batch of them ahead."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


RUNS: dict[str, Any] = {
    "several loaders": (Logs, val_loaders, {}),
    "plateau": (Plateau, lambda: val_loaders()[0], {"max_epochs": 6}),
    "in hooks": (InHooks, lambda: val_loaders()[0], {}),
    "streams": (TwoStreams, lambda: [DataLoader(Stream(), 10)] * 2, {}),
}


def fit_run(name: str, replicas: int | None = None) -> Any:
    make, val, kwargs = RUNS[name]
    return attempt(fit, make, None, val(), replicas, **kwargs)


def evaluate() -> dict[str, float]:
    torch.manual_seed(0)
    trainer, module = new_trainer(), Logs().double()
    # of one batch, and the first evaluation of its Trainer: 2 samples and 1
    few = new_trainer().test(module, DataLoader(samples(3, 7), 4), verbose=False)[0]
    first = trainer.validate(module, val_loaders()[0], verbose=False)[0]
    first |= {f"few_{name}": value for name, value in few.items()}
    return {**first, **trainer.test(module, val_loaders()[1], verbose=False)[0]}


def run_all() -> dict[str, Any]:
    return {**{name: fit_run(name) for name in RUNS}, "test": attempt(evaluate)}


@pytest.fixture(scope="module")
def in_two_processes() -> Any:
    return run_in_processes(2, run_all)


@pytest.mark.parametrize("name", RUNS)
def test_values_are_means_over_all_samples(name: str, in_two_processes: list[Any]) -> None:
    state, expected = fit_run(name)
    for found in (fit_run(name, 3), *(each[name] for each in in_two_processes)):
        assert not isinstance(found, str), found
        assert_close(found[0], state)
        # a value of one step is that of a part of the batch
        kept = {key: value for key, value in found[1].items() if not key.endswith("_step")}
        rtol = 1e-10 if name == "streams" else 1e-6
        assert_close(kept, {key: expected[key] for key in kept}, rtol)
        assert kept.keys() >= {key for key in expected if not key.endswith("_step")}


def test_validate_and_test_alone(in_two_processes: list[Any]) -> None:
    expected = evaluate()
    assert expected.keys() > {"val_loss", "test_loss", "test_max"}
    for found in in_two_processes:
        assert_close(found["test"], expected, 1e-5)
