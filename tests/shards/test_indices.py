"""Indices are cut, and not batches: what a batch is made of does not matter."""

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_mgpu.data import batch_loader
from lightning_mgpu.shards import ShardReader, cut_indices
from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    run_in_processes,
    samples,
)

Sample = tuple[Tensor, Tensor]


def stack(batch: list[Sample]) -> list[Tensor]:
    return [torch.stack([X for X, _ in batch]), torch.stack([y for _, y in batch])]


def with_captions(batch: list[Sample]) -> list[Any]:
    """Two captions per sample, as `default_collate` makes them: as many tuples as captions."""
    return [*stack(batch), [(f"{y}",) * len(batch) for _, y in batch[:2]]]


def with_metadata(batch: list[Sample]) -> list[Any]:
    """A list that is as long as the batch, and is about all of it."""
    return [*stack(batch), [float(sum(y for _, y in batch))] * len(batch)]


def time_first(batch: list[Sample]) -> list[Tensor]:
    X, y = stack(batch)
    return [X.T[..., None].contiguous(), y]  # (8, n, 1)


def flattened(batch: list[Sample]) -> list[Tensor]:
    """Clouds of two points per sample, in one tensor."""
    X, y = stack(batch)
    return [X.reshape(-1, 4), y]


def padded(batch: list[Sample]) -> list[Tensor]:
    """As wide as the largest class in the shard."""
    X, y = stack(batch)
    return [F.pad(X, (0, int(y.max()))), y]


@dataclass
class Graph:
    X: Tensor
    y: Tensor


class Any8(Net):
    """Takes the batch in any of these shapes, without the padding."""

    def loss(self, batch: Any) -> Tensor:
        X, y = (batch.X, batch.y) if isinstance(batch, Graph) else batch[:2]
        X = X.transpose(0, 1) if X.ndim == 3 else X
        X = X.reshape(len(y), -1)[:, :8]
        return F.cross_entropy(self.net(X), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": self.count(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=self.count(batch))

    def count(self, batch: Any) -> int:
        return len(batch.y if isinstance(batch, Graph) else batch[1])


class Counted(Any8):
    """Its loss has no weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


COLLATED: dict[str, tuple[type[Net], Any]] = {
    "captions": (Counted, with_captions),
    "metadata": (Counted, with_metadata),
    "time first": (Any8, time_first),
    "flattened": (Any8, flattened),
    "padded": (Counted, padded),
    "dataclass": (Any8, lambda batch: Graph(*stack(batch))),
}


def test_a_batch_that_does_not_tell_its_samples_needs_a_weight() -> None:
    data = DataLoader(samples(), 10, collate_fn=flattened)
    found = attempt(fit, Counted, data, replicas=2)
    assert 'so that its loss needs a weight: return {"loss": loss, "weight": n}' in found, found


def fit_collated(name: str, replicas: int | None = None) -> Any:
    make, collate = COLLATED[name]
    data = DataLoader(samples(), 10, shuffle=True, collate_fn=collate)
    val = DataLoader(samples(), 9, collate_fn=collate)
    return attempt(fit, make, data, val, replicas=replicas)


class Infinite(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(57).tolist()


class Draws(Dataset):
    """What it draws is a sample's noise."""

    def __len__(self) -> int:
        return 57

    def __getitem__(self, index: int) -> Sample:
        X, y = samples()[index]
        return X + torch.rand(8, dtype=X.dtype), y


class Views(Net):
    """Two loaders over one dataset that draws, for example for contrastive learning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not torch.equal(batch["a"][0], batch["b"][0])
        return self.loss(batch["a"]) + 2 * self.loss(batch["b"])


class Looks(Any8):
    """One process looks at some validation data while all train."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.is_global_zero:
            next(iter(self.trainer.val_dataloaders))

    def on_validation_epoch_end(self) -> None:
        self.on_train_epoch_start()


def drawn(num_workers: int = 0, replicas: int | None = None) -> Any:
    # these processes are daemons, which may not have children
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    has_workers = num_workers > 0
    loader: Any = DataLoader(
        Draws(),
        10,
        num_workers=num_workers,
        persistent_workers=has_workers,
        multiprocessing_context="fork" if has_workers else None,
    )
    return attempt(fit, Net, loader, replicas=replicas)


def drawn_by_batch_loader(replicas: int | None = None) -> Any:
    return attempt(
        fit,
        Counted,
        lambda trainer: batch_loader(Draws(), 10, trainer, shuffle=True, collate_fn=padded),
        replicas=replicas,
    )


def run_all() -> dict[str, Any]:
    found = {name: fit_collated(name) for name in COLLATED}
    found["drawn"] = drawn()
    found["drawn by 2 workers"] = drawn(2)
    found["drawn by batch_loader"] = drawn_by_batch_loader()
    views = {name: DataLoader(Draws(), 10) for name in "ab"}
    found["views"] = attempt(fit, Views, views)
    infinite = DataLoader(samples(), 10, sampler=Infinite())
    found["infinite"] = attempt(fit, Net, infinite, limit_train_batches=5)
    plain = {"data": DataLoader(samples(), 10), "val": DataLoader(samples(), 10)}
    found["looks"] = attempt(fit, Looks, **plain)
    found["does not look"] = attempt(fit, Any8, **plain)
    for size in (1, 2, 28):  # the last batch of 28 has one sample
        val = DataLoader(samples(), size)
        found[f"val {size}"] = attempt(fit, Counted, DataLoader(samples(), 10), val)
    return found


@pytest.fixture(scope="module")
def in_two_processes() -> Any:
    return run_in_processes(2, run_all)


@pytest.mark.parametrize("name", COLLATED)
def test_any_batch_is_that_of_one_device(name: str, in_two_processes: list[Any]) -> None:
    expected = fit_collated(name)
    for found in (fit_collated(name, 3), *(each[name] for each in in_two_processes)):
        assert_close(found, expected)


def test_what_is_drawn_is_the_same_in_any_process(in_two_processes: list[Any]) -> None:
    for name, expected in (
        ("drawn", drawn(replicas=2)),
        ("drawn by 2 workers", drawn(replicas=2)),
        ("drawn by batch_loader", drawn_by_batch_loader(2)),
    ):
        for found in in_two_processes:
            assert_close(found[name], expected, rtol=1e-15)


def test_each_shard_draws_numbers_of_its_own() -> None:
    """By pass, batch and replica, although all of them read the same sample here."""
    reader, drawn_twice = ShardReader(Draws(), stack), []
    for _ in range(2):
        shards: list[Any] = []
        for seed, number in itertools.product((1, 2), (0, 1)):
            keys = cut_indices([0, 0], 2, range(2), number, seed)
            shards += reader[keys].shards
        drawn_twice.append([float(X[0, 0]) for X, _ in shards])
    assert drawn_twice[0] == drawn_twice[1] and len(set(drawn_twice[0])) == 8


def test_loaders_of_all_kinds(in_two_processes: list[Any]) -> None:
    infinite = DataLoader(samples(), 10, sampler=Infinite())
    expected = fit(Net, infinite, limit_train_batches=5)
    for found in in_two_processes:
        assert not isinstance(found["views"], str), found["views"]
        assert_close(found["infinite"], expected)
        assert_close(found["looks"], found["does not look"], rtol=1e-15)


def test_evaluation_counts_every_sample_once(in_two_processes: list[Any]) -> None:
    """Small batches are joined, so that each process has a sample in every step."""
    expected = fit(Counted, DataLoader(samples(), 10), DataLoader(samples(), 57))
    for found, size in itertools.product(in_two_processes, (1, 2, 28)):
        assert_close(found[f"val {size}"], expected)
