"""Digests of tensors."""

import pytest
import torch

from lightning_mgpu.strategies.equality import digest


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
