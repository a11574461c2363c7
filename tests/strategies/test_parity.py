"""Training on k devices is training on one: optimizers, schedulers, algorithms, buckets, uneven shares."""

from typing import Any

import pytest
import torch
from torch import optim

from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy

ALLREDUCE = pytest.mark.parametrize("engine", ["manual_allreduce"], indirect=True)


def sgd(module: Any) -> Any:
    return optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def adamw(module: Any) -> Any:
    return optim.AdamW(module.parameters(), 0.01)


def one_cycle(module: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), 0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8)  # changes the momentum too
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def every_epoch(module: Any) -> Any:
    optimizer = optim.Adam(module.parameters(), 0.01)
    return [optimizer], [optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def plateau(module: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), 0.1)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("configure", [sgd, adamw, one_cycle])
def test_optimizers(Regression, assert_parity, configure):
    assert_parity(lambda: Regression(optimizer=configure), (2, 3, 4), own_updates=True)


@pytest.mark.parametrize("configure", [every_epoch, plateau])
def test_schedulers(Regression, assert_parity, configure):
    assert_parity(lambda: Regression(optimizer=configure), max_epochs=3, val=True)


def test_one_replica_is_one_device(Regression, train, engine):
    state = train(Regression).state_dict()
    other = train(Regression, strategy=engine).state_dict()
    assert all(torch.equal(state[key], other[key]) for key in state)


@ALLREDUCE
@pytest.mark.parametrize("algorithm", ["tree", "sharded", "ring", "blocked", "foreach", "compiled"])
def test_algorithms(Regression, assert_parity, algorithm):
    assert_parity(Regression, strategy=lambda: f"manual_allreduce_{algorithm}")


@ALLREDUCE
@pytest.mark.parametrize("bucket_mb", [0.0, 1e-4, 100.0])
def test_buckets(Regression, assert_parity, bucket_mb):
    calls = []

    def counting(tensors):
        calls.append(tensors[0].shape)
        total = sum(tensor.to(tensors[0].device) for tensor in tensors)
        for tensor in tensors:
            tensor.copy_(total)

    assert_parity(Regression, strategy=lambda: ManualAllreduceStrategy(counting, bucket_mb=bucket_mb))
    assert (torch.Size([8, 6]) in calls) == (bucket_mb == 0)
    assert (torch.Size([83]) in calls) == (bucket_mb == 100)


@pytest.fixture
def Strategy(engine):
    return {"manual_allreduce": ManualAllreduceStrategy, "dp": DataParallelStrategy}[engine]


def test_shares(Regression, assert_parity, Strategy):
    assert_parity(Regression, (2,), strategy=lambda: Strategy(split=[0.7, 0.3]))
    # the single sample of the last batch would go to replica 1
    assert_parity(Regression, (2,), strategy=lambda: Strategy(split=[0.1, 0.9]))


def test_automatic_shares(Regression, assert_parity, Strategy):
    strategies = []

    def make():
        strategies.append(Strategy(split="auto"))
        return strategies[-1]

    assert_parity(Regression, strategy=make, max_epochs=3)
    assert all(strategy.split is not None for strategy in strategies)  # they were set on the way


def test_several_replicas_by_name(Regression, assert_parity, Strategy):
    assert_parity(Regression, (1,), strategy=lambda: Strategy(parallel_devices=["cpu", "cpu", "cpu"]))
