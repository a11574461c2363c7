"""Batches are cut as `tensor_split` cuts tensors."""

import re
from collections import UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.tv_tensors import BoundingBoxes

from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.distributed.sharding.split_batch import cut, num_samples, shard_sizes

X = torch.arange(20.0).reshape(10, 2)
Pair = namedtuple("Pair", "X y")
NAMES = list("abcdefghij")


def split_batch(batch, k):
    return cut(batch, shard_sizes(num_samples(batch), [1] * k))


@given(st.integers(0, 200), st.integers(1, 20))
def test_shards_are_those_of_tensor_split(more, k):
    num = k + more
    rows = torch.arange(num)
    expected = rows.tensor_split(k)
    assert shard_sizes(num, [1] * k) == [len(shard) for shard in expected]
    assert all(map(torch.equal, split_batch(rows, k), expected))


def test_shares_are_rounded_to_the_nearest_sizes():
    assert shard_sizes(10, [0.7, 0.3]) == [7, 3]
    assert shard_sizes(9, [3, 1]) == [7, 2]
    for num, shares in ((10, [0.01, 0.99]), (2, [1, 1, 1])):
        with pytest.raises(ValueError, match="cannot be split among"):
            shard_sizes(num, shares)


CUT = {  # with ten samples: what the last three are
    "tensor": (X, X[7:]),
    "array": (np.arange(10), np.arange(7, 10)),
    "list": ([X, X + 1], [X[7:], X[7:] + 1]),
    "named tuple": (Pair(X, X[:, 0]), Pair(X[7:], X[7:, 0])),
    "defaultdict": (defaultdict(list, a=X), {"a": X[7:]}),
    "names": ([X, NAMES], [X[7:], NAMES[7:]]),
    "a list for every sample": ([X, [[1, 2]] * 10], [X[7:], [[1, 2]] * 3]),
    "of every shard": ([X, X[:1], torch.tensor(3), "b" * 10, 10, None], None),
    "a list of length one": ([X, ["a"]], [X[7:], ["a"]]),
    "text in a named tuple": ([X, Pair(NAMES, NAMES)], [X[7:], Pair(NAMES[7:], NAMES[7:])]),
    "an array of strings": ([X, np.array(NAMES)], [X[7:], np.array(NAMES[7:])]),
}


@pytest.mark.parametrize("name", CUT)
def test_cut(name):
    batch, expected = CUT[name]
    assert num_samples(batch) == 10
    shard = cut(batch, [7, 3])[1]
    assert type(shard) is type(batch)
    expected = [X[7:], *batch[1:]] if expected is None else expected
    np.testing.assert_equal(plain(shard), plain(expected))


def plain(part):
    if isinstance(part, (Tensor, np.ndarray)):
        return part.tolist()
    if isinstance(part, (dict, UserDict)):
        return {key: plain(value) for key, value in part.items()}
    return [plain(item) for item in part] if isinstance(part, (list, tuple)) else part


def test_shards_are_views_that_count_their_own_edits():
    """A step may edit its shard in place after another has saved its own for the backward pass."""
    w = torch.ones(2, requires_grad=True)
    first, second = split_batch(X.clone(), 2)
    loss = (first * w).sum()
    second.mul_(2)
    loss.backward()
    assert w.grad is not None and torch.equal(w.grad, X[:5].sum(0))
    assert split_batch(X, 2)[1].data_ptr() == X[5:].data_ptr()


def test_tensors_of_other_classes_stay_what_they_are():
    boxes = BoundingBoxes(torch.ones(10, 4), format="XYXY", canvas_size=(4, 4))
    shard = split_batch(boxes, 2)[1]
    assert type(shard) is BoundingBoxes and shard.format == boxes.format and len(shard) == 5


class Opaque:
    def to(self, device):
        return self


BAD = {
    "lengths": ([X, X[:3]], "A batch of Tensor with lengths [3, 10]"),
    "no tensors": (NAMES, "A batch of list with lengths []"),
    "a list of another length": ([X, ["a", "b"]], "A list of 2 in a batch of 10 samples"),
    "text of ten fields": ([X, [tuple(NAMES)] * 10], "A list of 10 in a batch of 10 samples"),
    "no samples": (X[:0], "with lengths [0]"),
    "a graph": ([X, Opaque()], "A batch of Opaque, Tensor with lengths [10]"),
    "a module": ({"a": X, "b": nn.Linear(1, 1)}, "A batch of Linear, Tensor"),
    "sparse": (X.to_sparse(), "A batch of Tensor"),
    "images": ([torch.zeros(3, 4 + i, 4) for i in range(5)], "lengths [3, 5] cannot be split"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_split_is_refused(name):
    batch, said = BAD[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        split_batch(batch, 2)


def test_a_checksum_is_of_numbers_and_text():
    for one, other in (("a", "b"), (1, 2), (np.array(["a"]), np.array(["b"])), (X, X + 1)):
        assert checksum([X, {"a": [one]}]) != checksum([X, {"a": [other]}])
        array = np.array([one], dtype=object)
        assert checksum(array) != checksum(np.array([other], dtype=object))
    assert checksum([X, Opaque()]) == checksum([X, Opaque()])


def test_a_checksum_does_not_depend_on_addresses():
    """Strings in arrays of objects are other objects in each process; sparse tensors have none."""
    one, other = (np.array(["a" * n, Opaque()], dtype=object) for n in (3, 3))
    assert checksum(one) == checksum(other) != checksum(other[:1])
    assert checksum([X.to_sparse(), X]) == checksum([X.to_sparse(), X]) != checksum([X, X])
