"""What strategies are compared with: a loop written by hand, on one device and on several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.benchmark.parts import Parts


def train_batch(replicas: list[nn.Module], parts: Parts, lr: float = 0.01) -> Callable[[tuple[Tensor, Tensor]], None]:
    """A training step on copies of a model, each on its device: the book's `train_batch`, with torch's SGD.

    With one copy that is a plain PyTorch loop.
    """
    devices = [next(replica.parameters()).device for replica in replicas]
    optimizers = [torch.optim.SGD(replica.parameters(), lr) for replica in replicas]
    parameters = list(zip(*(replica.parameters() for replica in replicas)))

    def shards(part: Tensor) -> list[Tensor]:
        return [s.to(d, non_blocking=True) for s, d in zip(part.tensor_split(len(devices)), devices)]

    def step(batch: tuple[Tensor, Tensor]) -> None:
        X, y = batch
        with parts.profile("transfer"):
            X_shards, y_shards = shards(X), shards(y)
        with parts.profile("forward"):
            losses: list[Any] = [
                F.cross_entropy(replica(X_shard), y_shard, reduction="sum") / len(y)
                for replica, X_shard, y_shard in zip(replicas, X_shards, y_shards)
            ]
        with parts.profile("backward"):
            for loss in losses:
                loss.backward()
        with parts.profile("allreduce"):
            for copies in parameters:
                textbook_allreduce([parameter.grad for parameter in copies])
        with parts.profile("update"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return step
