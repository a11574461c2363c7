"""`batch_loader`: any dataset under the batch contract; two processes share every batch."""

from types import SimpleNamespace
from typing import Any

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
