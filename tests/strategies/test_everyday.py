"""Steps, hooks and loaders of everyday use: two processes train as one device does."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    new_trainer,
    rank,
    run_in_processes,
    samples,
    world_size,
)


class NothingToCount(Net):
    """Batches 1 and 4 have no weight: the optimizer leaves them out, its momentum as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = 0 if batch_idx in (1, 4) else len(batch[1])
        return {
            "loss": self.loss(batch) * (weight or float("nan")) / (weight or 1),
            "weight": weight,
        }


class ByHand(Net):
    """Gradients of three batches are accumulated by hand, and exchanged with the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        is_last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch), create_graph=True)
        if is_last:
            # else the graphs of all steps would stay in memory
            assert world_size() == 1 or not self.net[0].weight.grad.requires_grad
            optimizer.step()
            optimizer.zero_grad()


class LeavesEarly(Net):
    """An epoch ends in the middle of an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class LogsOnce(Net):
    """As Lightning's pages have it for one process."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        if self.trainer.is_global_zero:
            self.log("seen", float(batch_idx), rank_zero_only=True)


class CountsInForward(Net):
    """A buffer that `forward` writes, in validation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_seen += 1 + rank()


class Recomputed(Net):
    """BatchNorm in a checkpointed block: its layers run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def loss(self, batch: Any) -> Tensor:
        X: Any = checkpoint(self.block, batch[0], use_reentrant=False)
        return super().loss([X, batch[1]])


class GathersParts(Net):
    """Parts of five and four samples."""

    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.zeros(5 - rank()))


class HalvesGradients(Net):
    """A hook that replaces gradients, in every batch of a window."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from (samples()[i] for i in range(30))


class TwoStreams(Net):
    """Two validation loaders of unknown length: Lightning reads a batch of them ahead."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


RIGHT: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "nothing to count": (NothingToCount, {}),
    "nothing to count, accumulated": (NothingToCount, {"accumulate_grad_batches": 2}),
    "by hand": (ByHand, {}),
    "halves gradients": (HalvesGradients, {"accumulate_grad_batches": 3}),
    "leaves early": (LeavesEarly, {"accumulate_grad_batches": 2}),
}


def fit_right(name: str, replicas: int | None = None) -> Any:
    make, kwargs = RIGHT[name]
    return attempt(fit, make, replicas=replicas, **kwargs)


def fit_twice() -> Any:
    """With workers that persist; returns how many children are left, and what was trained."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    kept: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
    data = DataLoader(samples(), 10, num_workers=1, **kept)
    val = DataLoader(samples(), 10, num_workers=1, **kept)
    for _ in range(2):
        found = attempt(fit, LogsOnce, data, val)
    return len(multiprocessing.active_children()), found


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {name: fit_right(name) for name in RIGHT}
    val = DataLoader(samples(), 10)
    found["logs once"] = attempt(fit, LogsOnce, None, val)
    found["counts"] = attempt(fit, CountsInForward, None, val)
    found["recomputed"] = attempt(fit, Recomputed)
    found["streams"] = attempt(fit, TwoStreams, None, [DataLoader(Stream(), 10)] * 2)
    found["gathers"] = attempt(fit, GathersParts)
    found["twice"] = attempt(fit_twice)
    return found


@pytest.fixture(scope="module")
def in_two_processes() -> Any:
    return run_in_processes(2, run_all)


@pytest.mark.parametrize("name", RIGHT)
def test_training_is_that_of_one_device(name: str, in_two_processes: list[Any]) -> None:
    expected = fit_right(name, None if "nothing" not in name else 1)
    for found in in_two_processes:
        assert_close(found[name], expected)
    if name == "halves gradients":
        assert "A hook has edited gradients" in fit_right(name, 2)
    elif name != "by hand":
        assert_close(fit_right(name, 2), expected)


def test_a_value_of_one_process_is_logged(in_two_processes: list[Any]) -> None:
    expected = fit(LogsOnce, None, DataLoader(samples(), 10))
    for found in in_two_processes:
        state, logged = found["logs once"]
        assert_close(state, expected[0])
        assert_close(logged["val_loss"], expected[1]["val_loss"])


def test_buffers_are_equal_whoever_writes_them(in_two_processes: list[Any]) -> None:
    first, second = in_two_processes
    for name in ("counts", "recomputed"):
        assert_close(first[name], second[name], rtol=1e-15)
    assert first["counts"][0]["num_seen"] == 2 * 6  # the first process's
    assert_close(attempt(fit, Recomputed, replicas=2), first["recomputed"], rtol=1e-15)


def test_streams_are_validated(in_two_processes: list[Any]) -> None:
    expected = fit(TwoStreams, None, [DataLoader(Stream(), 10)] * 2)
    for found in in_two_processes:
        assert_close(found["streams"], expected)


def test_parts_of_different_sizes_are_one_line(in_two_processes: list[Any]) -> None:
    for found in in_two_processes:
        assert "all_gather of tensors of different shapes" in found["gathers"]


def test_a_second_fit_starts_workers_again(in_two_processes: list[Any]) -> None:
    expected = fit(LogsOnce, DataLoader(samples(), 10), DataLoader(samples(), 10))
    for found in in_two_processes:
        num_children, (state, _) = found["twice"]
        assert num_children == 0
        assert_close(state, expected[0])


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.rows: list[tuple[int, Any]] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        for batch, part in zip(predictions, indices[0], strict=True):
            self.rows += zip(part, batch.tolist(), strict=True)


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0]


def predict(batch_size: int) -> list[tuple[int, Any]]:
    writer = Writer()
    new_trainer(callbacks=writer).predict(Predicts().double(), DataLoader(samples(), batch_size))
    return writer.rows


@pytest.mark.parametrize("batch_size", [1, 28])
def test_predictions_of_an_epoch_know_their_samples(batch_size: int) -> None:
    """Batches of one sample are joined, and so is the last batch of 28."""
    first, second = run_in_processes(2, predict, batch_size)
    assert sorted(first + second) == list(enumerate(samples().tensors[0][:, 0].tolist()))


class EditsData(Net):
    """A momentum teacher, by `.data`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step >= 2:
            self.net[2].bias.data.mul_(0.999)
        return self.loss(batch)


class EditsLate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step == 10:
            with torch.no_grad():
                self.net[2].bias.mul_(0.999)
        return loss


@pytest.mark.parametrize("edits", [EditsData, EditsLate])
def test_weights_that_replicas_share_are_not_edited(edits: type[Net]) -> None:
    found = attempt(fit, edits, replicas=2)
    assert "`training_step` edits weights" in found, found


def train_on(directory: Path, num_workers: int, resumes: bool) -> Any:
    """Three epochs, or two that go on from the first one's checkpoint by Lightning."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    kept = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    data: Any = DataLoader(samples(), 10, shuffle=True, num_workers=num_workers, **kept)
    if not resumes:
        saves = ModelCheckpoint(directory, save_top_k=-1, filename="{epoch}")
        return attempt(fit, Net, data, max_epochs=2, callbacks=saves, enable_checkpointing=True)
    return attempt(fit, Net, data, max_epochs=2, ckpt_path=directory / "epoch=0.ckpt")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_checkpoint_of_lightning_goes_on(num_workers: int, tmp_path: Path) -> None:
    """As one device does, where Lightning draws the orders of the epochs that are left."""
    found = []
    for resumes in (False, True):
        each: Callable[..., Any] = train_on
        found.append(run_in_processes(2, each, tmp_path / "two", num_workers, resumes))
    for resumes, both in zip((False, True), found):
        expected = train_on(tmp_path / "one", num_workers, resumes)
        for process in both:
            assert_close(process, expected)
    assert world_size() == 1
