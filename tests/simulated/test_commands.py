"""Every subcommand on simulated devices, in this process.

python -m pytest -p tests.simulated.devices tests/simulated/test_commands.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

IS_SIMULATED = hasattr(torch, "sim")
pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="needs -p tests.simulated.devices")
LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test", "predict")]
SHORT = ("--data.source=synthetic", "--trainer.accelerator=sim", *LIMITS)
CKPT = "--ckpt_path=run/checkpoints/last.ckpt"
ENGINES = {
    "dp": ("--trainer.devices=2", "--trainer.strategy=dp"),
    "replicas": (
        "--trainer.devices=1",
        "--trainer.strategy=manual_allreduce",
        "--trainer.strategy.replicas=2",
    ),
}


@pytest.fixture
def on_sim(main: Callable[..., int], capfd: Any) -> Callable[..., str]:
    """Run a command line; returns what it prints."""

    def run(*args: str) -> str:
        assert main(*args) == 0
        return str(capfd.readouterr().out)

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_fit_and_all_that_goes_on_from_its_checkpoint(
    on_sim: Callable[..., str], engine: str
) -> None:
    out = on_sim("fit", *SHORT, *ENGINES[engine], "--trainer.max_epochs=1", "--run_dir=run")
    assert "epoch 1/1" in out and "sim" in out
    for name in ("validate", "test", "predict"):
        assert "sim" in on_sim(name, *SHORT, CKPT, "--trainer.devices=1", f"--run_dir={name}")
    assert "model.pt2: LeNet" in on_sim("export", CKPT, "--output=model.pt2")
    out = on_sim("fit", "--resume=run", "--trainer.max_epochs=2")
    assert "epoch 2/2" in out and "epoch 1/" not in out and "sim" in out


def test_a_sweeps_trial_has_a_process(on_sim: Callable[..., str], tmp_path: Path) -> None:
    options = (*SHORT, *ENGINES["dp"], "--trainer.max_epochs=1")
    on_sim("sweep", "--config=sweep/lenet_lr.yaml", "--count=1", *options)
    logs = [path.read_text() for path in tmp_path.glob("sweeps/lenet_lr/**/*000*.log")]
    assert len(logs) == 1 and "sim" in logs[0]
