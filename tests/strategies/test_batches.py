"""Batches of any shape and loader are split over the devices; others go whole to the first."""

from collections import UserDict
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from tiny_runs import MANUAL, Manual, Pair, Regression, Sample, a_loader, collated
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_mgpu.strategies.split_batch import split_batch

# what both strategies share
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)


class Named(UserDict):
    """A mapping of a user's own, as transformers' `BatchEncoding`."""


class Attributes(dict):
    """Has its items as attributes, too."""

    def __init__(self, *args):
        super().__init__(*args)
        self.__dict__ = self


def with_leaves(X, y):
    names = [f"{x:.3f}" for x in y[:, 0].tolist()]
    return {
        "names": names,
        "X": X,
        "y": y,
        "none": None,
        "scalar": torch.tensor(3.0),
        "array": y.numpy(),
        "n": 5,
    }


def checked(batch):
    assert batch["names"] == [f"{x:.3f}" for x in batch["y"][:, 0].tolist()]
    assert batch["none"] is None and batch["scalar"].ndim == 0 and batch["n"] == 5
    assert np.array_equal(batch["array"], batch["y"].cpu().numpy())
    return batch["X"], batch["y"]


def images(X, y):
    """Lists of images of different sizes, and of their targets, as in detection."""
    return [torch.cat([x, x[:n]]) for n, x in enumerate(X)], [
        {"y": v, "boxes": v.repeat(2)} for v in y
    ]


class Labelled(torch.Tensor):
    """A tensor with something beside its values, which a slice keeps."""

    def __getitem__(self, item):
        part = super().__getitem__(item)
        part.label = self.label
        return part


class Plain(torch.Tensor):
    """One whose slices are plain tensors, as torchvision's."""

    __torch_function__ = torch._C._disabled_torch_function_impl


BATCHES = {  # how a batch is made of X and y, and how the step finds them
    "tuple": (lambda X, y: (X, y), lambda b: b),
    "dict": (lambda X, y: {"X": X, "y": y}, lambda b: (b["X"], b["y"])),
    "nested": (lambda X, y: {"a": [{"X": X}, (y,)]}, lambda b: (b["a"][0]["X"], b["a"][1][0])),
    "namedtuple": (Pair, lambda b: (b.X, b.y)),
    "dataclass": (Sample, lambda b: (b.X, b.y)),
    "mapping of one's own": (lambda X, y: Named({"X": X, "y": y}), lambda b: (b["X"], b["y"])),
    "mapping around a dict": (
        lambda X, y: MappingProxyType({"X": X, "y": y}),
        lambda b: (b["X"], b["y"]),
    ),
    "items as attributes": (lambda X, y: Attributes({"X": X, "y": y}), lambda b: (b.X, b["y"])),
    "names, arrays and numbers": (with_leaves, checked),
    "two views": (lambda X, y: [[X, X + 1], y], lambda b: (b[0][0] + b[0][1], b[1])),
    "two dicts": (
        lambda X, y: ({"X": X}, {"y": y, "names": [*map(str, X)]}),
        lambda b: (b[0]["X"], b[1]["y"]),
    ),
}


@pytest.mark.parametrize("kind", [Labelled, Plain])
def test_a_kind_of_tensor(engine, kind):
    X = torch.zeros(5, 2).as_subclass(kind)
    X.label = "features"
    shards = split_batch(X, [3, 2])
    assert [len(shard) for shard in shards] == [3, 2]
    assert all(type(shard) is kind and shard.label == "features" for shard in shards)


def unpacking(unpack, base=Regression):
    return type("Module", (base,), {"loss": lambda self, batch: base.loss(self, unpack(batch))})


@pytest.mark.parametrize("name", BATCHES)
def test_kinds_of_batches(assert_parity, name):
    make, unpack = BATCHES[name]
    assert_parity(unpacking(unpack), loader=lambda: collated(make), val=True)


@pytest.mark.filterwarnings("ignore:A batch")
@pytest.mark.parametrize("name", ["nested", "two dicts", "two views"])
def test_as_many_samples_as_parts(assert_parity, name):
    """A batch of two things is not a list of two samples."""
    make, unpack = BATCHES[name]
    assert_parity(unpacking(unpack), (2,), loader=lambda: collated(make, 2, 8))


@pytest.mark.parametrize(
    "shards", [[3, 3, 2], [3, 2, 2], [2, 1, 1], [1, 1, 1], [1, 1], [1]], ids=str
)
def test_shards_are_even(trainer_on, shards):
    class Sizes(Regression):
        def predict_step(self, batch, batch_idx):
            return torch.full((len(batch[0]),), len(batch[0]))

    [found] = trainer_on(3).predict(Sizes(), a_loader(sum(shards), sum(shards)))
    assert found.tolist() == [n for n in shards for _ in range(n)]


class Graph:
    def __init__(self, X, y):
        self.X, self.y = X, y

    def to(self, device, **kwargs):
        return Graph(self.X.to(device), self.y.to(device))


UNSPLITTABLE = {
    "a graph and a tensor": (lambda X, y: (Graph(X, y), y), lambda b: (b[0].X, b[1])),
    "images of many sizes": (
        images,
        lambda b: (
            torch.stack([x[:6] for x in b[0]]),
            torch.stack([target["y"] for target in b[1]]),
        ),
    ),
    "a box for each sample": (
        lambda X, y: (X, [{"y": value[None]} for value in y]),
        lambda b: (b[0], torch.cat([target["y"] for target in b[1]])),
    ),
    "images in one list": (
        lambda X, y: {"images": [x.expand(3, 2, 6) for x in X]},
        lambda b: (
            torch.stack([x[0, 0] for x in b["images"]]),
            torch.stack([x[0, 0, :3] for x in b["images"]]),
        ),
    ),
    "a list of samples": (
        lambda X, y: [{"X": x, "label": v[0]} for x, v in zip(X, y)],
        lambda b: (
            torch.stack([sample["X"] for sample in b]),
            torch.stack([sample["X"][:3] for sample in b]),
        ),
    ),
    "gray images, and as many boxes each": (
        lambda X, y: ([x.reshape(1, 2, 3) for x in X], [{"boxes": v.repeat(2, 1)} for v in y]),
        lambda b: (
            torch.stack([x.flatten() for x in b[0]]),
            torch.stack([target["boxes"][0] for target in b[1]]),
        ),
    ),
    "an object that holds tensors": (
        lambda X, y: (X, SimpleNamespace(y=y)),
        lambda b: (b[0], b[1].y),
    ),
    "a packed sequence": (
        lambda X, y: (pack_padded_sequence(X, [6] * len(X), batch_first=True), y),
        lambda b: (pad_packed_sequence(b[0], batch_first=True)[0], b[1]),
    ),
    "different lengths": (
        lambda X, y: {"X": X, "y": y, "edges": torch.zeros(2, 9)},
        lambda b: (b["X"], b["y"]),
    ),
}


@pytest.mark.parametrize("kind", [Regression, Manual])
@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_what_cannot_be_split(assert_parity, name, kind):
    """A warning says so; the first device computes it, and all replicas are updated."""
    make, unpack = UNSPLITTABLE[name]
    with pytest.warns(UserWarning, match="not split"):
        assert_parity(unpacking(unpack, kind), loader=lambda: collated(make, 8, 20))


@pytest.mark.filterwarnings("ignore:A batch")
@pytest.mark.parametrize("batch_sizes", [(4, 4), (4, 3)])
@pytest.mark.parametrize("mode", ["max_size", "min_size"])
def test_combined_loaders(assert_parity, mode, batch_sizes):
    def unpack(batch):
        parts = (
            [part for part in batch.values() if part is not None]
            if isinstance(batch, dict)
            else [batch]
        )
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def loader():
        return CombinedLoader(
            {"a": a_loader(batch_sizes[0], 11), "b": a_loader(batch_sizes[1], 6)}, mode
        )

    assert_parity(unpacking(unpack), loader=loader)


def test_transfer_hooks_see_the_whole_batch(assert_parity):
    class Hooked(Regression):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 2, batch[1]]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [batch[0].to(device) + 1, batch[1].to(device)]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] + batch[0].std(0, correction=0), batch[1]]

    assert_parity(Hooked)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Regression, Manual])
def test_a_transfer_hook_that_computes_with_layers(assert_parity, kind, accumulate):
    """A first layer that looks at the whole batch."""

    class Stem(kind):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, 6, dtype=torch.float64)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            Z = self.stem(batch[0]).tanh()
            return Z - Z.mean(0), batch[1]

    assert_parity(Stem, **({} if kind is Manual else {"accumulate_grad_batches": accumulate}))


def test_callbacks_change_the_batch(assert_parity):
    def shift(trainer, module, batch, batch_idx):
        batch["X"].mul_(2)
        batch["shift"] = batch["X"].std(0, correction=0).expand_as(batch["X"])

    make = unpacking(lambda batch: (batch["X"] + batch["shift"], batch["y"]))
    callbacks = lambda: [LambdaCallback(on_train_batch_start=shift)]  # noqa: E731
    assert_parity(make, loader=lambda: collated(BATCHES["dict"][0]), callbacks=callbacks)
