"""What strategies are compared with: PyTorch loops written by hand, on one device and as the book does on several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.benchmark.parts import Parts

LR = 0.01

Step = Callable[[Any], None]  # given a batch (X, y)


def loop_step(model: nn.Module, device: torch.device, parts: Parts, lr: float = LR) -> Step:
    """One device: a plain PyTorch step."""
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        with parts.profile("transfer"):
            X, y = (part.to(device, non_blocking=True) for part in batch)
        with parts.profile("forward"):
            loss = F.cross_entropy(model(X), y)
        with parts.profile("backward"):
            optimizer.zero_grad()
            loss.backward()
        with parts.profile("update"):
            optimizer.step()

    return step


def book_step(replicas: list[nn.Module], parts: Parts, lr: float = LR) -> Step:
    """Several devices: the book's `train_batch` (see lightning_mgpu/book.py), for any model.

    Args:
        replicas: Copies of a model, one a shard of the batch, each on its device.
    """
    devices = [next(replica.parameters()).device for replica in replicas]
    parameters = list(zip(*(replica.parameters() for replica in replicas)))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        with parts.profile("transfer"):  # split_batch
            X_shards, y_shards = (
                [shard.to(d, non_blocking=True) for shard, d in zip(part.tensor_split(len(devices)), devices)]
                for part in batch
            )
        with parts.profile("forward"):
            losses = [
                F.cross_entropy(replica(X_shard), y_shard, reduction="sum")
                for X_shard, y_shard, replica in zip(X_shards, y_shards, replicas)
            ]
        with parts.profile("backward"):
            for loss in losses:
                loss.backward()
        with torch.no_grad():
            with parts.profile("allreduce"):
                for copies in parameters:
                    textbook_allreduce([parameter.grad for parameter in copies])
            with parts.profile("update"):  # sgd
                for copies in parameters:
                    for parameter in copies:
                        parameter.sub_(parameter.grad, alpha=lr / len(batch[0]))
                        parameter.grad.zero_()

    return step
