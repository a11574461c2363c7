"""Each process gets its part of every global batch, whatever the loader is."""

import csv
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from lightning_mgpu.callbacks import PredictionWriter
from lightning_mgpu.data import batch_loader
from tests.cases import Case, Predicts, Stream, Validated, Weighted, check
from tests.strategies.conftest import Net, new_trainer, rank, samples, world_size


class StartsApart(Net):
    """Every process draws other weights, and other numbers when training starts."""

    def __init__(self):
        torch.manual_seed(rank())
        super().__init__()

    def on_train_start(self):
        torch.rand(rank() + 1)


class Several(Net):
    def training_step(self, batch, batch_idx):
        second = self.loss(batch["b"]) if batch["b"] is not None else 0.0
        return self.loss(batch["a"]) + 2 * second


class Doubles(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1, batch[1]]


class AsksInSetup(Net):
    def __init__(self):
        super().__init__()
        torch.rand(rank() + 1)

    def setup(self, stage):
        assert self.trainer.estimated_stepping_batches == 24


class Balanced(Sampler[list[int]]):
    def __iter__(self):
        return (torch.randperm(57)[:10].tolist() for _ in range(len(self)))

    def __len__(self):
        return 6


def balanced():
    return DataLoader(samples(), batch_sampler=Balanced())


def several(num=57, second=57, size=10):
    first = DataLoader(samples(num), 10, shuffle=True)
    return CombinedLoader({"a": first, "b": DataLoader(samples(second, 2), size)}, "max_size")


def of_a_stream():
    loaders = {"a": DataLoader(samples(), 10, shuffle=True), "b": DataLoader(Stream(samples()), 10)}
    return CombinedLoader(loaders, "min_size")


def seeded_apart():
    generator = torch.Generator().manual_seed(rank())
    return DataLoader(samples(), 10, shuffle=True, generator=generator)


class Damaged(Dataset):
    def __len__(self):
        return 57

    def __getitem__(self, index):
        return None if index % 5 == 2 else samples()[index]


def leave_out(batch):
    return default_collate([each for each in batch if each is not None])


def damaged():
    return DataLoader(Damaged(), 10, collate_fn=leave_out)


class WeightedValidated(Weighted, Validated):
    pass


class Filters(Validated):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        is_used = batch[0][:, 0] > -0.5
        return [part[is_used] for part in batch]


class FiltersWeighted(Weighted, Filters):
    pass


def error_of(said, make=Validated, **loaders):
    arguments = lambda: {name: new() for name, new in loaders.items()}  # noqa: E731
    return Case(make, arguments, said)


LEFT_OUT = 'The loss of a shard needs a weight, {"loss": loss, "weight": n}: samples were dropped'
CASES = {
    "shuffled, other random numbers": Case(StartsApart),
    "a stream": Case(Net, lambda: {"data": DataLoader(Stream(samples()), 10)}),
    "several": Case(Several, lambda: {"data": several()}),
    "several, of other sizes": Case(Several, lambda: {"data": several(60, 120, 20)}),
    "several, one ends earlier": Case(Several, lambda: {"data": several(second=30)}),
    "several, a stream": Case(Several, lambda: {"data": of_a_stream()}),
    "moved by hooks": Case(Doubles),
    # a hook starts the first pass over the loader
    "asks in setup": Case(AsksInSetup, lambda: {"data": balanced(), "max_epochs": 4}),
    "split by rank": error_of(
        " loads different batches than process ",
        data=lambda: DataLoader(Stream([*samples()][rank() :: world_size()]), 10),
    ),
    "seeded by rank": error_of(" loads different batches than process ", data=seeded_apart),
    "few samples": error_of(
        "A batch of 1 samples cannot be split among 2 replicas: use drop_last=True",
        data=lambda: DataLoader(samples(), 28),
    ),
    "few samples to evaluate": error_of(
        "A batch of 1 samples cannot be split among 2",
        val=lambda: DataLoader(Subset(samples(), [1]), 2),
    ),
    "other samples": error_of(
        " differs from process ", data=lambda: DataLoader(samples(57, rank()), 10)
    ),
    "fewer samples": error_of(
        " differs from process ",
        data=lambda: DataLoader(Subset(samples(), range(56 + rank())), 10),
    ),
    "series": error_of(
        "50 samples in a batch of 8",
        data=lambda: DataLoader(Stream([torch.ones(50)] * 16), 8, collate_fn=list),
    ),
    "one sample": error_of(
        "DataLoader(batch_size=None) cannot be split",
        data=lambda: DataLoader([(torch.ones(8, 8), 1)] * 20, batch_size=None),
    ),
    "of other shares": error_of(
        "its shares of the loaders' batches differ, [0.",
        Several,
        data=lambda: several(60, 30, 5),
    ),
    "damaged, trained": Case(WeightedValidated, lambda: {"data": damaged(), "val": damaged()}),
    "filtered, trained": Case(FiltersWeighted, lambda: {"val": DataLoader(samples(), 10)}),
    "damaged, no weight": Case(Validated, lambda: {"data": damaged()}, LEFT_OUT),
    "filtered, no weight": Case(Filters, dict, LEFT_OUT),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_one_device(name, in_two_processes):
    check(__name__, name, in_two_processes)


def predict(make, size, directory):
    trainer = new_trainer(callbacks=PredictionWriter(), default_root_dir=directory)
    return len(trainer.predict(Predicts().double(), make(samples(), size)) or ())


in_batches = partial(batch_loader, trainer=None)


# batches of one sample are joined, and so is the last batch of 28
@pytest.mark.parametrize(
    ("make", "size"), [(DataLoader, 1), (DataLoader, 10), (DataLoader, 28), (in_batches, 10)]
)
def test_predictions_know_their_samples(make, size, in_two_processes, tmp_path):
    first, second = in_two_processes(predict, make, size, tmp_path)
    assert first == second > 0
    _, *rows = csv.reader((tmp_path / "predictions.csv").open())
    values = samples().tensors[0][:, 0].tolist()
    assert [(int(i), float(x)) for i, x in rows] == [*enumerate(values)]
