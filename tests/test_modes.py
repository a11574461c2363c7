"""The shipped YAMLs for debugging at work."""

from pathlib import Path

import pytest
import torch

from lightning_mgpu.models import LeNet
from tests.runs.conftest import last

ONE_DEVICE = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--run_dir=run")
STRATEGY = "--trainer.strategy=manual_allreduce"
DATA = ("--data.val_size=101", "--data.batch_size=64")


@pytest.fixture
def fit(main, root):
    given = (*ONE_DEVICE, STRATEGY, f"--data.root={root}", *DATA)
    yield lambda name, *args: main("fit", *(name and [f"--config={name}"]), *given, *args)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def test_debug_is_short_and_finds_nans(fit, monkeypatch, capfd):
    assert fit("debug/default.yaml") == 0
    assert "epoch 2/2" in capfd.readouterr().out and torch.are_deterministic_algorithms_enabled()
    assert last(Path("run"))["global_step"] == 10
    theirs = LeNet.training_step

    def training_step(self, batch, batch_idx):
        return (theirs(self, batch, batch_idx) * 0).sqrt()  # its gradient is 0 / 0

    monkeypatch.setattr(LeNet, "training_step", training_step)
    with pytest.raises(RuntimeError, match=r"(Sqrt|Mul)Backward0' returned nan"):
        fit("debug/default.yaml", "--run_dir=nan")
