"""Each process gets its part of every global batch, whatever the loader is."""

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, LearningRateFinder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from lightning_mgpu.data import batch_loader
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


class Stream(IterableDataset):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Draws(Net):
    """Every process draws other weights, and other numbers when training starts."""

    def __init__(self) -> None:
        torch.manual_seed(rank())
        super().__init__()

    def on_train_start(self) -> None:
        torch.rand(rank() + 1)


class Several(Net):
    """Batches of two loaders, of which one may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        second = self.loss(batch["b"]) if batch["b"] is not None else 0.0
        return self.loss(batch["a"]) + 2 * second


class Iterates(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Doubles(Net):
    """In the hooks that move a batch, in their order."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]


class Schedules(Net):
    """Its optimizer asks for the number of steps, for which Lightning starts the loader."""

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class StartsLoader(Net):
    def on_fit_start(self) -> None:
        self.trainer.fit_loop.setup_data()


class FindsRate(Net):
    lr = 0.1

    def configure_callbacks(self) -> Any:
        return LearningRateFinder(num_training_steps=8, update_attr=False)


class Balanced(Sampler[list[int]]):
    """Batches that are drawn one by one."""

    def __iter__(self) -> Iterator[list[int]]:
        return (torch.randperm(57)[:10].tolist() for _ in range(len(self)))

    def __len__(self) -> int:
        return 6


def balanced() -> DataLoader:
    return DataLoader(samples(), batch_sampler=Balanced())


def shuffled() -> DataLoader:
    return DataLoader(samples(), 10, shuffle=True)


def several(num: int = 57, second: int = 57, size: int = 10) -> Any:
    first = DataLoader(samples(num), 10, shuffle=True)
    return CombinedLoader({"a": first, "b": DataLoader(samples(second, 2), size)}, "max_size")


def of_a_stream() -> Any:
    loaders = {"a": DataLoader(samples(), 10, shuffle=True), "b": DataLoader(Stream(samples()), 10)}
    return CombinedLoader(loaders, "min_size")


STARTED = [*product((Schedules, StartsLoader, FindsRate), (balanced, shuffled))]
LOADERS: dict[str, tuple[type[Net], Callable[[], Any]]] = {
    "shuffled, other random numbers": (Draws, lambda: None),
    "a stream": (Net, lambda: DataLoader(Stream(samples()), 10)),
    "several": (Several, several),
    "several, of other sizes": (Several, lambda: several(60, 120, 20)),
    "several, one ends earlier": (Several, lambda: several(second=30)),
    "several, a stream": (Several, of_a_stream),
    "moved by hooks": (Doubles, lambda: None),
    # a hook starts the first pass over the loader
    **{f"{make.__name__}, {data.__name__}": (make, data) for make, data in STARTED},
}


def fit_loader(name: str, replicas: int | None = None) -> Any:
    make, data = LOADERS[name]
    return attempt(fit, make, data(), replicas=replicas)


def fit_all() -> list[dict[str, Any]]:
    found = {name: fit_loader(name) for name in LOADERS}
    return [found, {name: refuse(name) for name in REFUSED}]


@pytest.fixture(scope="module")
def in_two_processes() -> Any:
    return run_in_processes(2, fit_all)


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_one_device(name: str, in_two_processes: list[Any]) -> None:
    expected = fit_loader(name)
    for found in (each[0][name] for each in in_two_processes):
        assert_close(found, expected)
    if "other sizes" not in name:  # for three replicas, shards have other shares
        assert_close(fit_loader(name, 3), expected)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.rows: list[tuple[int, Any]] = []

    def write_on_batch_end(self, *args: Any) -> None:
        prediction, indices = args[2:4]
        self.rows += zip(indices, prediction.tolist(), strict=True)


def predict(loader: str) -> list[tuple[int, Any]]:
    class Predicts(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0][:, 0]

    writer = Writer()
    make: Any = {"DataLoader": DataLoader, "batch_loader": batch_loader}[loader]
    new_trainer(callbacks=writer).predict(Predicts().double(), make(samples(), 10))
    return writer.rows


@pytest.mark.parametrize("loader", ["DataLoader", "batch_loader"])
def test_predictions_know_their_samples(loader: str) -> None:
    first, second = run_in_processes(2, predict, loader)
    assert [row[0] for row in first[:6]] == [0, 1, 2, 3, 4, 10]
    assert sorted(first + second) == list(enumerate(samples().tensors[0][:, 0].tolist()))


def seeded_apart() -> DataLoader:
    generator = torch.Generator().manual_seed(rank())
    return DataLoader(samples(), 10, shuffle=True, generator=generator)


def stack(items: list[Any]) -> Any:
    """Draws, as one that masks words does."""
    X = torch.tensor([[float(item.x)] * 8 for item in items], dtype=torch.float64)
    return X + torch.rand(1), torch.zeros(len(items), dtype=torch.long)


def of_two_sizes() -> CombinedLoader:
    """Batches of 9 samples, and a last one with a single sample."""
    data = {name: DataLoader(samples(19, i), 9) for i, name in enumerate("ab")}
    return CombinedLoader(data, "max_size")


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "split by rank": (
        lambda: (DataLoader(Stream([*samples()][rank() :: world_size()]), 10), None),
        " has other batches",
    ),
    "seeded by rank": (lambda: (seeded_apart(), None), " has other batches"),
    "few samples": (
        lambda: (DataLoader(samples(), 28), None),
        "A batch of 1 samples cannot be shared out to 2 replicas: use drop_last=True",
    ),
    "few samples to evaluate": (
        lambda: (None, DataLoader(Subset(samples(), [1]), 2)),
        "A batch of 1 samples cannot be shared out to 2",
    ),
    "other samples": (lambda: (DataLoader(samples(57, rank()), 10), None), " has another dataset"),
    "fewer samples": (
        lambda: (DataLoader(Subset(samples(), range(56 + rank())), 10), None),
        " has another dataset",
    ),
    "other objects": (
        lambda: (DataLoader([SimpleNamespace(x=rank())] * 20, 10, collate_fn=stack), None),
        " has another dataset",
    ),
    "series": (
        lambda: (DataLoader(Stream([torch.ones(50)] * 16), 8, collate_fn=list), None),
        "50 samples in a batch of 8",
    ),
    "one sample": (
        lambda: (DataLoader([(torch.ones(8, 8), 1)] * 20, batch_size=None), None),
        "DataLoader(batch_size=None) does not tell samples from batches",
    ),
    "of other shares": (
        lambda: (several(60, 30, 5), None, Several),
        "loaders have other shares of their batches, [(0.",
    ),
    "an iterator": (
        lambda: (DataLoader(samples(), 10), None, Iterates),
        "training_step(dataloader_iter): an iterator does not tell its batches",
    ),
    "together": (
        lambda: (None, of_two_sizes(), ValidatesSeveral),
        "A batch of 1 samples cannot be shared out to 2",
    ),
    "no rows": (
        lambda: (DataLoader(Stream(["a"] * 4), 4), None),
        "A batch of list with lengths []",
    ),
}


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class ValidatesSeveral(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch["a"]) + self.loss(batch["b"]))


def refuse(name: str) -> Any:
    data, val, *make = REFUSED[name][0]()
    return attempt(fit, make[0] if make else Validated, data, val)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str, in_two_processes: list[Any]) -> None:
    for found in (each[1][name] for each in in_two_processes):
        assert REFUSED[name][1] in found and "\n" not in found, found
