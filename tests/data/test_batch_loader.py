"""`batch_loader`: any dataset under the batch contract; two processes share every batch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_mgpu.data import batch_loader


def test_two_processes_share_every_batch() -> None:
    dataset = TensorDataset(torch.arange(10))
    shares = []
    for rank in range(2):
        trainer: Any = SimpleNamespace(world_size=2, global_rank=rank, overfit_batches=0)
        shares.append([X.tolist() for (X,) in batch_loader(dataset, 4, trainer, shuffle=True, seed=1)])
    alone = [X.tolist() for (X,) in batch_loader(dataset, 4, shuffle=True, seed=1)]
    assert [a + b for a, b in zip(*shares)] == alone
    assert [len(X) for X in alone] == [4, 4, 2] and sorted(x for batch in alone for x in batch) == list(range(10))


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))


class Named(TensorDataset):
    name = "own"


@pytest.mark.parametrize(("kind", "factor"), [(TensorDataset, 1), (Named, 1), (Doubled, 2)])
def test_a_datasets_own_getitem_makes_its_samples(kind: type[TensorDataset], factor: int) -> None:
    batches = batch_loader(kind(torch.arange(5), torch.ones(5, 2)), 3)
    X, y = (torch.cat(parts) for parts in zip(*batches))
    assert X.tolist() == [factor * i for i in range(5)] and torch.equal(y, torch.full((5, 2), float(factor)))


@pytest.mark.parametrize("first", [0, 2])
def test_workers_give_the_same_batches(first: int) -> None:
    def batches(num_workers: int) -> list[list[int]]:
        loader = batch_loader(TensorDataset(torch.arange(10)), 3, shuffle=True, seed=1, num_workers=num_workers)
        loader.sampler.set_epoch(2)
        loader.load_state_dict({"num_yielded": first})  # of a run resumed within an epoch
        return [X.tolist() for (X,) in loader]

    assert batches(2) == batches(0) and len(batches(0)) == 4 - first
