"""Devices by name, Apple's too, of which there are none here: what torch is asked for counts."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.auto_split import AutoSplit
from lightning_mgpu.strategies.devices_and_attributes import (
    current_device,
    find_device,
    gpus_first,
    wait_for,
)
from lightning_mgpu.strategies.split_batch import send

MPS, CPU = torch.device("mps", 0), torch.device("cpu")


@pytest.fixture
def apple(monkeypatch):
    """A machine with Apple's GPU; returns how often it was waited for."""
    waits = []
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append("mps"))
    return waits


def test_a_device_has_the_index_that_its_tensors_have(apple):
    """A tensor on `mps` says that it is on `mps:0`, and the two are not equal."""
    assert [find_device(name) for name in ("mps", "mps:0", "cpu")] == [MPS, MPS, CPU]
    strategy = ManualAllreduceStrategy(parallel_devices=["mps", "cpu"])
    assert strategy.devices == [MPS, CPU]
    with current_device(MPS):  # nothing to choose
        pass


def test_apples_device_is_missing_elsewhere():
    with pytest.raises(MisconfigurationException, match="no 'mps'; torch sees 0 MPS"):
        find_device("mps")


def test_apples_device_is_waited_for(apple):
    """Else `split=auto` takes the time of launching for the time of computing."""
    wait_for(MPS)
    with AutoSplit().timed(0, MPS):
        pass
    wait_for(CPU)
    assert apple == ["mps", "mps"]


@pytest.mark.parametrize(
    ("home", "device"), [(CPU, MPS), (MPS, CPU), (CPU, torch.device("cuda", 0))]
)
def test_copies_that_must_not_race(monkeypatch, home, device):
    """As Lightning: a copy to the CPU or to Apple's GPU is done when the call returns."""
    asked = []
    monkeypatch.setattr(Tensor, "to", lambda self, to, **kwargs: asked.append((to, kwargs)))
    monkeypatch.setattr(Tensor, "device", home)
    send(torch.ones(2), home, device)
    assert asked == [(device, {"non_blocking": device.type == "cuda"})]


def test_a_gpu_starts_before_the_cpu_is_busy():
    assert gpus_first(range(4), [CPU, torch.device("cuda", 0), CPU, torch.device("cuda", 1)]) == [
        1,
        3,
        0,
        2,
    ]
