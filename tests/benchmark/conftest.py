import pytest
import torch

from tests.conftest import run_devices


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPU devices are measured wherever the tests run, or simulated ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if run_devices(1) == [torch.device("cpu")]:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: None
        )
