"""Waiting for devices that this machine may lack: the test looks at the calls of torch."""

from typing import Any

import pytest
import torch

from lightning_mgpu.devices import synchronize


def test_devices_of_every_kind_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, an epoch's seconds would be those of launching its kernels."""
    cuda, xpu, mps, cpu = (torch.device(name) for name in ("cuda:1", "xpu:0", "mps:0", "cpu"))
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.xpu, "synchronize", waits.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(mps))
    synchronize([cuda, cpu, xpu, mps, cuda])
    assert sorted(waits, key=str) == [cuda, mps, xpu]
