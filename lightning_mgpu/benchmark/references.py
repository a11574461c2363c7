"""What strategies are compared with: PyTorch loops written by hand, on one device and as the book does on several."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.benchmark.parts import Parts
from lightning_mgpu.book import split_batch

LR = 0.01

Step = Callable[[Any], None]
"""A training step, given a batch (X, y)."""


def loop_step(model: nn.Module, device: torch.device, parts: Parts, lr: float = LR) -> Step:
    """One device: a plain PyTorch step."""
    model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        with parts("transfer"):
            X, y = (part.to(device, non_blocking=True) for part in batch)
        with parts("forward"):
            loss = F.cross_entropy(model(X), y)
        with parts("backward"):
            optimizer.zero_grad()
            loss.backward()
        with parts("update"):
            optimizer.step()

    return step


def book_step(replicas: list[nn.Module], parts: Parts, lr: float = LR) -> Step:
    """Several devices: `train_batch` of `lightning_mgpu/book.py`, for any model, with every part of a step timed.

    Args:
        replicas: Copies of a model, one on every device.
    """
    devices = [next(replica.parameters()).device for replica in replicas]
    parameters = list(zip(*(replica.parameters() for replica in replicas)))

    def step(batch: tuple[Tensor, Tensor]) -> None:
        X, y = batch
        with parts("transfer"):
            X_shards, y_shards = split_batch(X, y, devices)
        with parts("forward"):
            losses = [
                F.cross_entropy(replica(X_shard), y_shard, reduction="sum")
                for X_shard, y_shard, replica in zip(X_shards, y_shards, replicas)
            ]
        with parts("backward"):
            for loss in losses:
                loss.backward()
        with torch.no_grad():
            with parts("allreduce"):
                for copies in parameters:
                    textbook_allreduce([parameter.grad for parameter in copies])
            with parts("update"):  # sgd
                for copies in parameters:
                    for parameter in copies:
                        parameter.sub_(parameter.grad, alpha=lr / len(X))
                        parameter.grad.zero_()

    return step


def run_steps(batches: Iterable, step: Step, num_steps: int, parts: Parts) -> None:
    """Take steps on the first batches."""
    iterator = iter(batches)
    for _ in range(num_steps):
        with parts("data"):
            batch = next(iterator)
        step(batch)
