"""Digests of tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_mgpu.strategies.equality import bytes_of, digest, digest_batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_digests_tell_signs_places_and_small_differences(dtype):
    X = torch.arange(1, 65).to(dtype)
    flipped, swapped, moved = -X, X.clone(), X.clone()
    swapped[[3, 5]] = X[[5, 3]]
    moved[7] += 1
    assert len({digest(each).item() for each in (X, flipped, swapped, moved)}) == 4
    assert digest(X.view(8, 8).t().contiguous().t()) == digest(X)


def test_digests_do_not_tell_zeros_or_nans_apart():
    zeros, nans = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    assert digest(zeros) == digest(torch.tensor([-0.0, 1.0]))
    assert digest(nans) == digest(torch.cat([-nans[:1], nans[1:]]))
    assert digest(torch.tensor([1 + 2j]).conj()) == digest(torch.tensor([1 - 2j]))


def test_batches_are_told_apart_by_all_that_is_in_them():
    X, names, rows = torch.rand(50, 1, 28, 28), ["a", "b"], np.arange(6)
    others = [
        (X[:49], names, rows),
        (X.flip(0), names, rows),
        (X.view(50, 28, 28), names, rows),
        (X, ["b", "a"], rows),
        (X, names, rows[::-1]),
        (X.conj_physical() * 1j, names, rows),
    ]
    each = [
        tuple(digest_batch([X, *n, r], at_most=1000)) for X, n, r in [(X, names, rows), *others]
    ]
    assert len({*each}) == len(each)
    assert digest_batch([X.clone()]) == digest_batch([X]) != digest_batch([X], at_most=1000)
    changed = X.clone()
    changed[:, 0, 14] += 1  # a row of each image: whatever the step, some elements are of it
    assert digest_batch([changed], 1000) != digest_batch([X], 1000)
    assert digest_batch([torch.empty(0, 3)]) != digest_batch([])


class Graph:
    """As torch_geometric has them: tensors in an attribute's attributes, and a way back."""

    def __init__(self, **tensors):
        self.store = SimpleNamespace(mapping=tensors, parent=self)


def test_batches_are_told_apart_by_tensors_in_objects():
    def objects(X):
        yield pack_sequence([X, X[:1]])
        yield Graph(X=X, edges=torch.zeros(2, 3).long())
        yield X.to_sparse()
        yield torch.nested.nested_tensor([X, X[:1]], layout=torch.strided)
        yield torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)
        yield np.array([X, "a"], dtype=object)
        yield SimpleNamespace(X=X, f=lambda: 0)  # pickle fails at the function

    X, changed = torch.eye(3), torch.eye(3)
    changed[2, 2] += 1
    for one, same, other in zip(objects(X), objects(X.clone()), objects(changed)):
        kind = type(one).__name__
        assert digest_batch([one, 1]) == digest_batch([same, 1]), kind
        assert digest_batch([one, 1]) != digest_batch([other, 1]), kind


def test_bytes_of_tensors_with_any_strides():
    X = torch.randn(4, 5)
    Z = torch.complex(X, X).conj()
    odd = [X[:, 0], X[:1, 0], X[:0, 0], X[0, 0], X.t(), X[:1, :1].expand(-1, 7), Z, Z.imag]
    for each in (X, *odd):
        assert torch.equal(bytes_of(each).view(each.dtype).view(each.shape), each)
    assert bytes_of(X).data_ptr() == X.data_ptr()
    assert digest_batch(odd) == digest_batch([each.clone() for each in odd])
