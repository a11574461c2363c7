"""Indices are cut, and not batches: what a batch is made of does not matter."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, random_split

from lightning_mgpu.data import batch_loader
from tests.cases import Case, check
from tests.strategies.conftest import Net, fit, make_strategy, samples


def stack(batch):
    return [torch.stack([X for X, _ in batch]), torch.stack([y for _, y in batch])]


def flattened(batch):
    X, y = stack(batch)
    return [X.reshape(-1, 4), y]


def padded(batch):
    X, y = stack(batch)
    return [F.pad(X, (0, int(y.max()))), y]


@dataclass
class Graph:
    X: Tensor
    y: Tensor


class Any8(Net):
    def loss(self, batch):
        X, y = (batch.X, batch.y) if isinstance(batch, Graph) else batch[:2]
        X = X.reshape(len(y), -1)[:, :8]
        return F.cross_entropy(self.net(X), y)

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "weight": self.count(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=self.count(batch))

    def count(self, batch):
        return len(batch.y if isinstance(batch, Graph) else batch[1])


class Counted(Any8):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Draws(Dataset):
    def __len__(self):
        return 57

    def __getitem__(self, index):
        X, y = samples()[index]
        return X + torch.rand(8, dtype=X.dtype), y


class Views(Net):
    def training_step(self, batch, batch_idx):
        assert not torch.equal(batch["a"][0], batch["b"][0])
        return self.loss(batch["a"]) + 2 * self.loss(batch["b"])


class Distinct(Net):
    """In all epochs, samples that are read again have been given other noise."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, batch):
        self.seen += batch[0]
        return super().loss(batch)

    def on_train_end(self):
        assert len(torch.stack(self.seen).unique(dim=0)) == len(self.seen)


def split(num_workers=0):
    part, _ = random_split(Draws(), [46, 11], torch.Generator().manual_seed(0))
    kept = {"persistent_workers": True, "multiprocessing_context": "fork", "in_order": False}
    kept = kept if num_workers else {}
    return DataLoader(part, 10, shuffle=True, num_workers=num_workers, **kept)


def weighted():
    return DataLoader(Draws(), 10, sampler=WeightedRandomSampler(torch.arange(57) < 9, 57))


def padded_by_batch_loader(trainer):
    return batch_loader(Draws(), 10, trainer, shuffle=True, collate_fn=padded)


def collated(make, collate):
    return Case(
        make,
        lambda: {
            "data": DataLoader(samples(), 10, shuffle=True, collate_fn=collate),
            "val": DataLoader(samples(), 9, collate_fn=collate),
        },
    )


def drawn(make, data):
    """Lightning's own strategy draws other numbers."""
    expected = lambda: fit(make, data(), strategy=make_strategy())  # noqa: E731
    return Case(make, lambda: {"data": data()}, expected=expected)


def not_shuffled(size=10):
    return {"data": DataLoader(samples(), 10), "val": DataLoader(samples(), size)}


def val_in_batches(size):
    """Small batches are joined, so that each process has a sample in every step."""

    return Case(
        Counted,
        lambda: not_shuffled(size),
        expected=lambda: fit(Counted, **not_shuffled(57)),
    )


CASES = {
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
    **{f"val {size}": val_in_batches(size) for size in (1, 2, 28)},  # the last of 28 has one sample
}


@pytest.mark.parametrize("name", CASES)
def test_any_batch_is_that_of_one_device(name, in_two_processes):
    check(__name__, name, in_two_processes)


def test_two_loaders_draw_other_numbers(in_two_processes):
    data = {name: DataLoader(Draws(), 10) for name in "ab"}
    for found in in_two_processes(fit, Views, data):
        assert not isinstance(found, str), found
