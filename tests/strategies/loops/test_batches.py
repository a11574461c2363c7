"""Batches of any shape, from any loader: over replicas they train what they do on one device."""

from collections import namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Pair = namedtuple("Pair", "X y")


@dataclass
class Sample:
    X: Any
    y: Any


def checked_names(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert batch["names"] == [f"{x:.3f}" for x in batch["y"].tolist()]
    assert batch["none"] is None and batch["scalar"].ndim == 0 and len(batch["array"]) == len(batch["y"])
    assert np.array_equal(batch["array"], batch["y"].cpu().numpy())
    return batch["X"], batch["y"]


BATCHES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda X, y: (X, y), lambda b: b),
    "list": (lambda X, y: [X, y], lambda b: b),
    "dict": (lambda X, y: {"X": X, "y": y}, lambda b: (b["X"], b["y"])),
    "nested": (lambda X, y: {"a": [{"X": X}, (y,)]}, lambda b: (b["a"][0]["X"], b["a"][1][0])),
    "list_of_dicts": (lambda X, y: [{"X": X}, {"y": y}], lambda b: (b[0]["X"], b[1]["y"])),
    "namedtuple": (Pair, lambda b: (b.X, b.y)),
    "dataclass": (Sample, lambda b: (b.X, b.y)),
    "leaves": (
        lambda X, y: {
            "names": [f"{x:.3f}" for x in y.tolist()], "X": X, "y": y, "none": None, "scalar": torch.tensor(3.0),
            "array": y.numpy(), "weights": torch.rand(1, 7),
        },
        checked_names,
    ),
    "images": (  # lists of tensors of different lengths, and of targets
        lambda X, y: (
            [torch.cat([x, torch.zeros(n)]) for n, x in enumerate(X)],
            [{"y": v, "boxes": v.repeat(4)} for v in y],
        ),
        lambda b: (torch.stack([x[:4] for x in b[0]]), torch.stack([t["y"] for t in b[1]])),
    ),
    "different_lengths": (lambda X, y: {"X": X, "y": y, "edges": torch.zeros(2, 9)}, lambda b: (b["X"], b["y"])),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:A batch whose parts differ")
@pytest.mark.parametrize("name", BATCHES)
def test_batches(trainer_on: Any, Regression: Any, collated: Any, assert_fits_alike: Any, name: str) -> None:
    make, unpack = BATCHES[name]
    assert_fits_alike(trainer_on, lambda: Regression(unpack), collated(make))


def test_batches_nobody_can_split(trainer_on: Any, Regression: Any, assert_fits_alike: Any) -> None:
    """They go whole to one device; the others take part in the update."""

    class Numbers(Regression):
        def loss(self, batch: Any) -> Tensor:
            X = torch.tensor(list(map(float, batch.numbers)), dtype=torch.float64, device=self.device)
            return self.net(X.view(1, 4)).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
            return self.loss(batch)

    class Box:
        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

    def unpack(batch: Box) -> tuple[list[int], None]:
        return batch.numbers, None

    with pytest.warns(UserWarning, match="nobody knows how to cut"):
        assert_fits_alike(trainer_on, lambda: Numbers(unpack), lambda: DataLoader(range(12), 4, collate_fn=Box))


class Features(MutableMapping):
    """A user's own mapping, whose copies would share what is inside."""

    def __init__(self, features: Any) -> None:
        self.features = dict(features)

    def __getitem__(self, key: str) -> Tensor:
        return self.features[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.features[key] = value

    def __delitem__(self, key: str) -> None:
        del self.features[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)

    def __len__(self) -> int:
        return len(self.features)


def test_mappings_of_ones_own(
    trainer_on: Any, Regression: Any, collated: Any, assert_fits_alike: Any, fitted: Any
) -> None:
    class Whole(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, _: Any, batch: Any, i: int) -> None:
            assert len(batch["X"]) == (3 if i == 2 else 4)

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["X"], batch["y"]

    make = collated(lambda X, y: Features({"X": X, "y": y}))
    assert_fits_alike(trainer_on, lambda: Regression(unpack), make)
    fitted(trainer_on, 2, lambda: Regression(unpack), make, Whole())


def test_batches_of_one_sample(trainer_on: Any, Regression: Any, loader: Any, assert_fits_alike: Any) -> None:
    assert_fits_alike(trainer_on, Regression, lambda: loader(5, 1))


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
@pytest.mark.parametrize("batch_sizes", [(4, 4), (4, 3)])
@pytest.mark.filterwarnings("ignore:A batch whose parts differ")
def test_combined_loaders(
    trainer_on: Any, Regression: Any, loader: Any, assert_fits_alike: Any, mode: Any, batch_sizes: tuple[int, int]
) -> None:
    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        parts = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def make() -> CombinedLoader:
        return CombinedLoader({"a": loader(11, batch_sizes[0]), "b": loader(6, batch_sizes[1])}, mode)

    assert_fits_alike(trainer_on, lambda: Regression(unpack), make)


def test_iterable_dataset_and_workers(
    trainer_on: Any, Regression: Any, data: Any, loader: Any, assert_fits_alike: Any
) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(data(7))

    assert_fits_alike(trainer_on, Regression, lambda: DataLoader(Stream(), 3))
    assert_fits_alike(
        trainer_on, Regression, lambda: loader(num_workers=1, multiprocessing_context="fork"), max_epochs=1
    )
