"""Batches of any shape: cut, put together again, and what is not a batch."""

import random
from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_mgpu.strategies.batch.gather import gather
from lightning_mgpu.strategies.batch.shards import find_batch_size, shard_sizes, split_batch

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "X y")


@dataclass
class Sample:
    X: Tensor
    name: Any


class Graph:
    """Something nobody knows how to cut."""


class Movable(Graph):
    """All nodes of several graphs, say."""

    def to(self, *args: Any, **kwargs: Any) -> "Movable":
        return self


def images(*widths: int) -> list[Tensor]:
    return [torch.rand(3, 4, width) for width in widths]


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.rand(count, 4), "labels": torch.arange(count)} for count in counts]


@pytest.mark.parametrize(
    ("batch_size", "shares", "sizes"),
    [
        (7, [1, 1, 1], [3, 2, 2]),
        (2, [1, 1, 1], [1, 1, 0]),
        (10, [0.9, 0.1], [9, 1]),
        (1, [0.1, 0.9], [0, 1]),
        (0, [1, 1], [0, 0]),
    ],
)
def test_shard_sizes(batch_size: int, shares: list[float], sizes: list[int]) -> None:
    assert shard_sizes(batch_size, shares) == sizes


def test_shard_sizes_add_up_and_are_the_proportion_rounded() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shares = [draw.choice([1.0, draw.uniform(0.01, 5)]) for _ in range(draw.randint(1, 8))]
        batch_size = draw.randint(0, 300)
        sizes = shard_sizes(batch_size, shares)
        assert sum(sizes) == batch_size
        assert all(abs(size - batch_size * share / sum(shares)) < 1 for size, share in zip(sizes, shares))


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.rand(5, 2), 5),
        ([torch.rand(5, 2), torch.rand(5)], 5),
        ([torch.rand(2, 3), torch.rand(2)], 2),  # as many parts as samples
        ([{"X": torch.rand(2, 3)}, {"Z": torch.rand(2)}], 2),
        (Pair({"X": torch.rand(2, 3)}, {"y": torch.rand(2)}), 2),
        ({"X": torch.rand(1, 3), "names": ["a"]}, 1),
        ({"weight": torch.rand(1, 9), "X": torch.rand(5, 2), "lr": torch.tensor(0.1)}, 5),  # length 1: for all samples
        ({"name": ["a", "b"], "X": torch.rand(2, 1), "none": None, "epoch": 3}, 2),
        ({"X": np.zeros((4, 2)), "y": torch.rand(4)}, 4),
        ((images(5, 6), boxes(1, 4)), 2),
        ((images(5, 6), boxes(3, 3)), 2),  # three channels, three boxes, two images
        ((images(5, 6, 7), boxes(3, 3, 3)), 3),
        ({"images": images(5, 6), "targets": boxes(2, 2)}, 2),
        ([torch.rand(2, 3, 4, 4), boxes(2, 2)], 2),  # stacked images, lists of boxes
        ([torch.rand(2, 3, 4, 4), boxes(5, 0)], 2),
        ({"targets": boxes(4, 1), "images": torch.rand(2, 3, 4, 4)}, 2),
        ([[torch.rand(4, 2), torch.rand(4)], [torch.rand(4, 2), torch.rand(4)]], 4),  # combined loaders
        ([[torch.rand(4, 2), torch.rand(4, 2)], torch.rand(4)], 4),  # two views
        (["one", "two", "three"], 3),
        (("one", "two"), 2),
        ((["one", "two"], [0, 1]), 2),
        (Sample(torch.rand(3, 2), ["a", "b", "c"]), 3),
        # What cannot be split
        (None, None),
        (7, None),
        ([], None),
        ({}, None),
        (Graph(), None),
        (torch.tensor(1.0), None),
        (torch.rand(0, 3), None),
        ({"a": torch.rand(8, 2), "b": torch.rand(5, 2)}, None),
        ({"x": torch.rand(8, 2), "edge_index": torch.zeros(2, 20)}, None),
        ([[torch.rand(8, 2), torch.rand(8)], [torch.rand(5, 2), torch.rand(5)]], None),
        (pack_sequence([torch.rand(3, 2)]), None),
        (torch.eye(3).to_sparse(), None),
        ((Movable(), torch.rand(4)), None),
        ({"graph": Movable(), "y": torch.rand(4)}, None),
        # What may be images of three channels, or samples as many as there are boxes
        ([torch.rand(3, 5, 5), torch.rand(3, 6, 5)], None),
        ((images(5, 5, 5), [torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4)]), None),
        ((images(5, 5, 5), torch.rand(3)), None),
        ({"X": torch.rand(2, 3, 4, 4), "boxes": [torch.rand(2, 4), torch.rand(2, 4)]}, None),
        ((images(5, 5, 5, 5), torch.rand(4)), 4),
        ([torch.rand(3, 5, 5), torch.rand(3)], 3),
    ],
)
def test_batch_size(batch: Any, size: int | None) -> None:
    assert find_batch_size(batch) == size


def test_shards_of_a_detection_batch(equal: Any) -> None:
    X, y = images(5, 6, 7), boxes(3, 3, 3)
    (X0, y0), (X1, y1) = split_batch((X, y), [2, 1])
    assert equal(X0, X[:2]) and equal(X1, X[2:])
    assert equal(y0, y[:2]) and equal(y1, y[2:])


def test_shards_of_two_views_of_two_samples(equal: Any) -> None:
    batch = [[torch.rand(2, 3), torch.rand(2, 3)], torch.rand(2)]
    first, second = split_batch(batch, [1, 1])
    assert equal(second, [[batch[0][0][1:], batch[0][1][1:]], batch[1][1:]])
    assert first[0][0].data_ptr() == batch[0][0].data_ptr()  # a view


def test_shards_of_two_combined_batches_of_two_samples(equal: Any) -> None:
    batch = [{"X": torch.rand(2, 3)}, {"X": torch.rand(2, 3)}]
    assert equal(split_batch(batch, [1, 1])[1], [{"X": part["X"][1:]} for part in batch])


def test_leaves_of_no_sample_go_to_all_shards() -> None:
    weight, graph = torch.rand(1, 9), Graph()
    for shard in split_batch({"X": torch.rand(5), "weight": weight, "graph": graph, "size": 7}, [3, 2]):
        assert shard["weight"] is weight and shard["graph"] is graph and shard["size"] == 7


def random_batch(draw: random.Random, size: int, depth: int = 0) -> Any:
    """A nesting of leaves as long as the batch."""
    kinds = ["float", "int", "bool", "array", "names"] + ["list", "tuple", "dict", "pair", "sample"] * (depth < 3)
    kind = draw.choice(kinds)
    if kind == "names":
        return [draw.choice("abc") for _ in range(size)]
    if kind == "array":
        return np.array([draw.random() for _ in range(size)])
    if kind in ("float", "int", "bool"):
        dtype = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}[kind]
        shape = [size] + [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
        return torch.tensor([draw.randint(0, 9) for _ in range(int(np.prod(shape)))]).reshape(shape).to(dtype)
    parts = [random_batch(draw, size, depth + 1) for _ in range(draw.randint(1, 4))]
    if kind == "dict":
        return {f"key{n}": part for n, part in enumerate(parts)}
    if kind == "pair":
        return Pair(parts[0], parts[-1])
    if kind == "sample":
        return Sample(torch.rand(size), parts[0])
    return parts if kind == "list" else tuple(parts)


@pytest.mark.parametrize("seed", range(5))
def test_gather_undoes_split(equal: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        batch_size, k = draw.randint(6, 20), draw.randint(1, 5)  # lists are shorter than that
        batch = {"X": torch.rand(batch_size), "rest": random_batch(draw, batch_size)}
        assert find_batch_size(batch) == batch_size
        sizes = [size for size in shard_sizes(batch_size, [draw.uniform(0.5, 2) for _ in range(k)]) if size]
        shards = split_batch(batch, sizes)
        assert all(find_batch_size(shard) == size for shard, size in zip(shards, sizes) if size > 4)
        assert equal(gather(shards, sizes, CPU), batch)


@pytest.mark.parametrize(
    ("outputs", "sizes", "whole"),
    [
        ([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], torch.tensor(2.0)),  # means
        ([torch.tensor(1), torch.tensor(4)], [2, 1], torch.tensor(5)),  # counts
        ([3, 3], [4, 4], 6),
        ([3, 0.5], [1, 1], 1.75),
        ([1.0, 4.0], [2, 1], 2.0),
        ([False, True], [1, 1], True),
        ([torch.tensor(False), torch.tensor(True)], [1, 1], torch.tensor(True)),
        ([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [2, 1], torch.tensor([1.0, 2.0, 3.0])),
        ([torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [2, 1], torch.tensor([1.0, 2.0, 3.0])),  # squeezed
        ([torch.zeros(6, 2), torch.ones(6, 2)], [3, 3], torch.cat([torch.zeros(6, 2), torch.ones(6, 2)])),  # tokens
        ([torch.ones(5), torch.ones(5)], [3, 2], torch.ones(5)),  # something of a class each
        ([torch.ones(5, dtype=int), torch.ones(5, dtype=int)], [3, 2], torch.full((5,), 2)),
        ([None, torch.tensor([1.0])], [2, 1], torch.tensor([1.0])),
        ([None, None], [2, 1], None),
        ([{"a": 1.0}, {"a": 4.0, "b": "x"}], [2, 1], {"a": 2.0, "b": "x"}),
        ([MappingProxyType({"a": 1.0}), MappingProxyType({"a": 4.0})], [2, 1], MappingProxyType({"a": 2.0})),
        (["same", "same"], [1, 1], "same"),
        (["one", "two"], [3, 3], ["one", "two"]),
        ([("a", "b"), ("c",)], [2, 1], ("a", "b", "c")),
        ([["a", "b", "c"], []], [2, 1], ["a", "b", "c"]),  # as many as were found
        ([(torch.tensor(1.0), 3), (torch.tensor(3.0), 3)], [2, 2], (torch.tensor(2.0), 6)),
        ([Pair(torch.zeros(1), 1), Pair(torch.ones(1), 2)], [1, 1], Pair(torch.tensor([0.0, 1.0]), 3)),
        ([Sample(torch.zeros(2), "a"), Sample(torch.ones(1), "a")], [2, 1], Sample(torch.tensor([0.0, 0, 1]), "a")),
        (
            [[torch.zeros(2, 2), torch.zeros(2, 3)], [torch.ones(2, 2), torch.ones(2, 3)]],
            [2, 2],  # logits and features of two samples, not two samples
            [torch.tensor([[0.0] * 2] * 2 + [[1.0] * 2] * 2), torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2)],
        ),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], [1, 1], [torch.zeros(2), torch.zeros(3)]),  # padded by each for itself
        ([boxes(0), boxes(0)], [1, 1], boxes(0, 0)),
        ([np.zeros(2), np.ones(1)], [2, 1], np.array([0.0, 0.0, 1.0])),
    ],
)
def test_gather(equal: Any, outputs: list[Any], sizes: list[int], whole: Any) -> None:
    assert equal(gather(outputs, sizes, CPU), whole)


def test_what_nobody_can_join_is_kept() -> None:
    graphs = [Graph(), Graph()]
    assert gather(graphs, [1, 1], CPU) == graphs
