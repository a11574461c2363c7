"""Indices are cut, and not batches: what a batch is made of does not matter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler, random_split

from lightning_mgpu.data import batch_loader
from tests.cases import Case, check
from tests.strategies.conftest import (
    Net,
    assert_close,
    fit,
    make_strategy,
    new_trainer,
    samples,
)

Sample = tuple[Tensor, Tensor]


def stack(batch: list[Sample]) -> list[Tensor]:
    return [torch.stack([X for X, _ in batch]), torch.stack([y for _, y in batch])]


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

    def loss(self, batch):
        X, y = (batch.X, batch.y) if isinstance(batch, Graph) else batch[:2]
        X = X.transpose(0, 1) if X.ndim == 3 else X
        X = X.reshape(len(y), -1)[:, :8]
        return F.cross_entropy(self.net(X), y)

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": self.count(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=self.count(batch))

    def count(self, batch):
        return len(batch.y if isinstance(batch, Graph) else batch[1])


class Counted(Any8):
    """Its loss has no weight."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Infinite(Sampler[int]):
    def __iter__(self):
        while True:
            yield from torch.randperm(57).tolist()


class Draws(Dataset):
    """What it draws is a sample's noise."""

    def __len__(self):
        return 57

    def __getitem__(self, index):
        X, y = samples()[index]
        return X + torch.rand(8, dtype=X.dtype), y


class Views(Net):
    """Two loaders over one dataset that draws, for example for contrastive learning."""

    def training_step(self, batch, batch_idx):
        assert not torch.equal(batch["a"][0], batch["b"][0])
        return self.loss(batch["a"]) + 2 * self.loss(batch["b"])


class Distinct(Net):
    """In all epochs, samples that are read again have been given other noise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def loss(self, batch):
        self.seen += batch[0]
        return super().loss(batch)

    def on_train_end(self):
        assert len(torch.stack(self.seen).unique(dim=0)) == len(self.seen)


def split(num_workers: int = 0) -> DataLoader:
    part, _ = random_split(Draws(), [46, 11], torch.Generator().manual_seed(0))
    kept: Any = {"persistent_workers": True, "multiprocessing_context": "fork", "in_order": False}
    kept = kept if num_workers else {}
    return DataLoader(part, 10, shuffle=True, num_workers=num_workers, **kept)


def weighted() -> DataLoader:
    """Each sample is drawn several times."""
    return DataLoader(Draws(), 10, sampler=WeightedRandomSampler(torch.arange(57) < 9, 57))


def padded_by_batch_loader(trainer: Any) -> DataLoader:
    return batch_loader(Draws(), 10, trainer, shuffle=True, collate_fn=padded)


class Means(Net):
    def test_step(self, batch, batch_idx):
        self.log("mean", batch[0].mean())


def evaluate_twice() -> list[Any]:
    torch.manual_seed(0)
    trainer, module = new_trainer(strategy=make_strategy()), Means()
    data = DataLoader(Draws(), 10)
    return [trainer.test(module, data, verbose=False) for _ in range(2)]


def collated(make: type[Net], collate: Any) -> Case:
    return Case(
        make,
        lambda: {
            "data": DataLoader(samples(), 10, shuffle=True, collate_fn=collate),
            "val": DataLoader(samples(), 9, collate_fn=collate),
        },
    )


def drawn(make: type[Net], data: Callable[[], Any]) -> Case:
    """Lightning's own strategy draws other numbers."""
    expected = lambda: fit(make, data(), strategy=make_strategy())  # noqa: E731
    return Case(make, lambda: {"data": data()}, expected=expected)


def not_shuffled(size: int = 10) -> dict[str, Any]:
    return {"data": DataLoader(samples(), 10), "val": DataLoader(samples(), size)}


def val_in_batches(size: int) -> Case:
    """Small batches are joined, so that each process has a sample in every step."""

    return Case(
        Counted,
        lambda: not_shuffled(size),
        expected=lambda: fit(Counted, **not_shuffled(57)),
    )


def infinite() -> dict[str, Any]:
    return {"data": DataLoader(samples(), 10, sampler=Infinite()), "limit_train_batches": 5}


CASES = {
    "time first": collated(Any8, time_first),
    "flattened": collated(Any8, flattened),
    "padded": collated(Counted, padded),
    "dataclass": collated(Any8, lambda batch: Graph(*stack(batch))),
    "does not tell its samples": Case(
        Counted,
        lambda: {"data": DataLoader(samples(), 10, collate_fn=flattened)},
        'The loss of a shard needs a weight, {"loss": loss, "weight": n}: the number of samples',
    ),
    "drawn, split": drawn(Distinct, split),
    "drawn, 2 workers": drawn(Distinct, lambda: split(2)),
    "drawn, weighted": drawn(Distinct, weighted),
    # here Lightning's own strategy draws the same
    "drawn, batch_loader": Case(Counted, lambda: {"data": padded_by_batch_loader}),
    "infinite": Case(Net, infinite),
    **{f"val {size}": val_in_batches(size) for size in (1, 2, 28)},  # the last of 28 has one sample
}


@pytest.mark.parametrize("name", CASES)
def test_any_batch_is_that_of_one_device(name, in_two_processes):
    check(__name__, name, in_two_processes)


def test_two_loaders_draw_other_numbers(in_two_processes):
    data = {name: DataLoader(Draws(), 10) for name in "ab"}
    for found in in_two_processes(fit, Views, data):
        assert not isinstance(found, str), found


def test_an_evaluation_draws_other_numbers_each_time(in_two_processes):
    expected = evaluate_twice()
    assert expected[0] != expected[1]
    for found in in_two_processes(evaluate_twice):
        assert_close(found, expected, 1e-6)
