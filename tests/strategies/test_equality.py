"""Digests of tensors."""

import numpy as np
import pytest
import torch

from lightning_mgpu.strategies.equality import digest, digest_batch


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
