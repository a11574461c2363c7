"""What to run first on a machine with GPUs: `pytest -m gpu` takes minutes, without a download."""

import pytest
import torch

from lightning_mgpu import allreduce
from lightning_mgpu.devices import gpus
from lightning_mgpu.strategies import DataParallelStrategy
from tests.strategies.conftest import Net, assert_close, fit, run_in_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU")]
KIND = gpus()[0].type if gpus() else "cpu"
ALGORITHMS = ("textbook", "tree", "sharded", "ring", "key_value")


class OnGPU(Net):
    def on_train_start(self):
        assert self.device.type == KIND


def trained(strategy="auto", devices=1):
    return fit(OnGPU, strategy=strategy, devices=devices, accelerator=KIND)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_allreduce_sums_between_gpus(name):
    devices = [torch.device("cpu"), *(gpus()[i % len(gpus())] for i in range(4))]
    for given in (devices, devices[1:]):
        allreduce.check_allreduce(getattr(allreduce, f"{name}_allreduce"), given)


def test_dp_on_one_gpu_trains_as_one_device():
    two = DataParallelStrategy(parallel_devices=[str(gpus()[0])] * 2)
    assert_close(trained(two), trained(), 1e-9, 1e-12)


@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["manual_allreduce", "manual_allreduce_ring"])
def test_processes_on_two_gpus_train_as_one_device(name):
    one = trained(devices=1)
    for found in run_in_processes(2, trained, name, 2):
        assert_close(found, one, 1e-9, 1e-12)


def test_an_epoch_of_the_books_lenet(main, capfd):
    options = ("--data.source=synthetic", "--trainer.devices=1", "--trainer.max_epochs=1")
    assert main("fit", *options, f"--trainer.accelerator={KIND}") == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" in out and f"sec/epoch on [device(type='{KIND}', index=0)]" in out
