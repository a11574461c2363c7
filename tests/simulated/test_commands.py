"""Every subcommand on simulated devices, and those that start processes with them.

python -m pytest -p tests.simulated.devices tests/simulated/test_commands.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

IS_SIMULATED = hasattr(torch, "sim")
pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="needs -p tests.simulated.devices")
TWO = ("--trainer.devices=2", "--trainer.strategy=manual_allreduce")
LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test", "predict")]
SHORT = ("--data.source=synthetic", "--trainer.accelerator=sim", *LIMITS)
CKPT = "--ckpt_path=run/checkpoints/last.ckpt"


@pytest.fixture
def on_sim(main: Callable[..., int], capfd: Any) -> Callable[..., str]:
    """Run a command line; returns what it prints."""

    def run(*args: str) -> str:
        assert main(*args) == 0
        return str(capfd.readouterr().out)

    return run


def test_fit_and_all_that_goes_on_from_its_checkpoint(on_sim: Callable[..., str]) -> None:
    out = on_sim("fit", *SHORT, *TWO, "--trainer.max_epochs=1", "--run_dir=run")
    assert "ManualAllreduceStrategy (textbook_allreduce) on sim:0, sim:1" in out
    assert "sec/epoch on [device(type='sim', index=0), device(type='sim', index=1)]" in out
    for name in ("validate", "test", "predict"):
        one = (CKPT, "--trainer.devices=1", f"--run_dir={name}")
        assert "SingleDeviceStrategy on sim:0" in on_sim(name, *SHORT, *one)
    assert "model.pt2: LeNet" in on_sim("export", CKPT, "--output=model.pt2")
    out = on_sim("fit", "--resume=run", "--trainer.max_epochs=2")
    assert "epoch 2/2" in out and "epoch 1/" not in out and "on sim:0, sim:1" in out


def test_a_sweeps_trial_has_a_process(on_sim: Callable[..., str], tmp_path: Path) -> None:
    options = (*SHORT, "--trainer.devices=2", "--trainer.strategy=dp", "--trainer.max_epochs=1")
    on_sim("sweep", "--config=sweep/lenet_lr.yaml", "--count=1", *options)
    assert "on sim:0, sim:1" in (tmp_path / "sweeps/lenet_lr/trial_000.log").read_text()


def test_promises() -> None:
    suite = pytest.importorskip("lightning_mgpu.testing")  # a directory that can be deleted
    for result in suite.check_strategy("manual_allreduce", 2, "sim"):
        assert result.is_kept or result.reason, f"{result.name}: {result.wrong}"
