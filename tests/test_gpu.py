"""What to run first on a machine with GPUs: `pytest -m gpu` takes minutes, without a download."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu import allreduce
from lightning_mgpu.devices import gpus
from lightning_mgpu.models import LeNet
from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy
from tests.strategies.conftest import OFF, run_in_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU")]
KIND = gpus()[0].type if gpus() else "cpu"
ALGORITHMS = ("textbook", "tree", "sharded", "ring", "key_value", "foreach")


def trained(strategy: Any = "auto", devices: int = 1) -> list[Tensor]:
    """LeNet's parameters after four steps in float64. The last batch has two samples."""
    seed_everything(0, verbose=False)
    module = LeNet(lr=0.5).double()
    data = TensorDataset(torch.rand(23, 1, 28, 28).double(), torch.arange(23) % 10)
    trainer = Trainer(
        **dict.fromkeys(OFF, False),
        accelerator=KIND,
        devices=devices,
        strategy=strategy,
        max_epochs=1,
    )
    trainer.fit(module, DataLoader(data, 7))
    assert trainer.strategy.root_device.type == KIND
    return [parameter.detach().cpu() for parameter in module.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_allreduce_sums_between_gpus(name: str) -> None:
    devices = [torch.device("cpu"), *(gpus()[i % len(gpus())] for i in range(4))]
    for given in (devices, devices[1:]):
        allreduce.check_allreduce(getattr(allreduce, f"{name}_allreduce"), given)


@pytest.mark.parametrize("name", ["manual_allreduce", "dp"])
def test_replicas_on_one_gpu_train_as_one_device(name: str) -> None:
    two = [str(gpus()[0])] * 2
    strategies = {
        "dp": DataParallelStrategy(parallel_devices=two),
        "manual_allreduce": ManualAllreduceStrategy(replicas=2),
    }
    assert_same(trained(strategies[name]), trained())


def trained_by_two_on_one() -> list[Tensor]:
    two: Any = {"parallel_devices": ["cuda:0"] * 2, "process_group_backend": "gloo"}
    return trained(ManualAllreduceStrategy(**two), devices=2)


@pytest.mark.skipif(KIND != "cuda", reason="NCCL takes one process per GPU, and gloo CUDA's")
def test_two_processes_on_one_gpu_train_as_one_device() -> None:
    one = trained()
    for found in run_in_processes(2, trained_by_two_on_one):
        assert_same(found, one)


@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["manual_allreduce", "manual_allreduce_ring"])
def test_processes_on_two_gpus_train_as_one_device(name: str) -> None:
    one = trained(devices=1)
    for found in run_in_processes(2, trained, name, 2):
        assert_same(found, one)


def test_an_epoch_of_the_books_lenet(main: Callable[..., int], capfd: Any) -> None:
    options = ("--data.source=synthetic", "--trainer.devices=1", "--trainer.max_epochs=1")
    assert main("fit", *options, f"--trainer.accelerator={KIND}") == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" in out and f"sec/epoch on [device(type='{KIND}', index=0)]" in out
