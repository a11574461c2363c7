"""Waiting for devices that this machine may lack: the tests look at the calls of torch."""

from typing import Any

import pytest
import torch

from lightning_mgpu.devices import synchronize

CUDA, XPU, MPS, CPU = (torch.device(name) for name in ("cuda:1", "xpu:0", "mps:0", "cpu"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that were waited for."""
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.xpu, "synchronize", waits.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(MPS))
    return waits


def test_devices_of_every_kind_are_waited_for_once(waits: list[Any]) -> None:
    """Without it, an epoch's seconds would be those of launching its kernels."""
    synchronize([CUDA, CPU, XPU, MPS, CUDA])
    assert sorted(waits, key=str) == [CUDA, MPS, XPU]
