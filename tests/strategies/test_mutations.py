"""Versions that are wrong on purpose, the book's and others': each makes the check named in its test fail."""

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.strategies import ManualAllreduceStrategy, manual_allreduce, replicated, train_batch
from lightning_mgpu.strategies.gradients import losses
from lightning_mgpu.strategies.optimizers.optimizers import ReplicaOptimizers
from lightning_mgpu.strategies.replicas import replicas


def rebinding_allreduce(tensors: list[Tensor]) -> None:
    """The book's from 2021-01 to 2021-12: replicas above 0 never get the sum."""
    for i in range(1, len(tensors)):
        tensors[0][:] += tensors[i].to(tensors[0].device)
    for i in range(1, len(tensors)):
        tensors[i] = tensors[0].to(tensors[i].device)


def skipping_allreduce(tensors: list[Tensor]) -> None:
    """Leaves the last device's term out of the sum."""
    total = sum(tensor.to(tensors[0].device) for tensor in tensors[: max(len(tensors) - 1, 1)])
    for tensor in tensors:
        tensor.copy_(total)


def averaging_allreduce(tensors: list[Tensor]) -> None:
    total = sum(tensor.to(tensors[0].device) for tensor in tensors) / len(tensors)
    for tensor in tensors:
        tensor.copy_(total)


ALLREDUCE = pytest.mark.parametrize("engine", ["manual_allreduce"], indirect=True)
WRONG = [rebinding_allreduce, skipping_allreduce, averaging_allreduce]


@ALLREDUCE
@pytest.mark.parametrize("allreduce", WRONG)
@pytest.mark.parametrize("bucket_mb", [0, 10])
def test_refused_on_start(Regression, train, allreduce, bucket_mb):
    with pytest.raises(ValueError, match=rf"{allreduce.__name__} left device \d"):
        train(Regression, 2, strategy=ManualAllreduceStrategy(allreduce, bucket_mb=bucket_mb))


@ALLREDUCE
@pytest.mark.parametrize("allreduce", WRONG[1:])
def test_parity_fails(Regression, assert_parity, monkeypatch, allreduce):
    monkeypatch.setattr(manual_allreduce, "check_allreduce", lambda *_: None)
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(Regression, strategy=lambda: ManualAllreduceStrategy(allreduce), check=False)


@ALLREDUCE
def test_refused_on_the_first_gradients(Regression, train, monkeypatch):
    """What goes wrong with the module's own shapes only."""
    monkeypatch.setattr(manual_allreduce, "check_allreduce", lambda *_: None)
    with pytest.raises(ValueError, match=r"rebinding_allreduce.*another sum"):
        train(Regression, 3, strategy=ManualAllreduceStrategy(rebinding_allreduce), check=False)


@ALLREDUCE
def test_gradients_differ(Regression, train, monkeypatch):
    """With both checks off, replicas above 0 update themselves with other gradients."""
    monkeypatch.setattr(manual_allreduce, "check_allreduce", lambda *_: None)
    monkeypatch.setattr(manual_allreduce, "check_equal", lambda *_: None)
    agreed = []
    update = ReplicaOptimizers.update

    def watched(self, *args):
        parameters = self.replicas.parameters
        agreed.append(
            all(torch.equal(first.grad.cpu(), other.grad.cpu()) for first, *rest in parameters for other in rest)
        )
        update(self, *args)

    monkeypatch.setattr(ReplicaOptimizers, "update", watched)
    train(Regression, 3, strategy=ManualAllreduceStrategy(rebinding_allreduce), check=False)
    assert not all(agreed)
    agreed.clear()
    train(Regression, 3)
    assert len(agreed) == 8
    assert all(agreed)


@ALLREDUCE
def test_shared_storage(Regression, train, assert_parity, monkeypatch):
    """`get_params` without `clone`: all replicas are the first one, and every update is made k times."""

    def aliasing(module, device):
        replica = get_params(module, device)
        for parameter, original in zip(replica.parameters(), module.parameters()):
            parameter.data = original.data
        return replica

    get_params = replicas.get_params
    monkeypatch.setattr(replicas, "get_params", aliasing)
    with pytest.raises(AssertionError):
        train(Regression, 2)
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(Regression, check=False)


def test_mean_of_means(Regression, assert_parity, monkeypatch):
    """Wrong for uneven shards only."""
    combine = losses.combine_losses
    monkeypatch.setattr(
        losses, "combine_losses", lambda parts, sizes, backward: combine(parts, [1] * len(sizes), backward)
    )
    assert_parity(Regression, (2,), limit_train_batches=3)
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(Regression, (3,), limit_train_batches=3)


def test_mean_of_means_with_manual_optimization(Regression, assert_parity, monkeypatch):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            self.optimizers().zero_grad()

    lockstep = train_batch.Lockstep
    even = lambda team, weights, joint: lockstep(team, dict.fromkeys(weights, 1 / len(weights)), joint)  # noqa: E731
    assert_parity(Module, (3,))
    monkeypatch.setattr(train_batch, "Lockstep", even)
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(Module, (3,))


def test_statistics_of_device_0_alone(Regression, assert_parity, monkeypatch):
    """The book's concise version keeps the first device's BatchNorm statistics."""

    def make():
        return Regression(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))

    monkeypatch.setattr(replicated, "synchronize_batch_norm", lambda *_: None)
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(make, sync_batchnorm=True, limit_train_batches=3)
