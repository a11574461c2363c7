"""Everyday modes: debug, overfit, deterministic."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.models import LeNet

CPU = "--trainer.accelerator=cpu"
TWO_REPLICAS = ("--trainer.devices=2", "--trainer.strategy=manual_allreduce")


@pytest.fixture
def fit(main: Callable[..., int], root: Path) -> Iterator[Callable[..., int]]:
    """Run `fit` on the tiny dataset: 402 images to train on, 101 to validate."""
    yield lambda *args: main("fit", CPU, f"--data.root={root}", "--data.val_size=101", "--data.batch_size=64", *args)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def load(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def losses(run: Path, name: str = "train_loss") -> list[float]:
    head, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return [float(row[head.index(name)]) for row in rows if row[head.index(name)]]


@pytest.mark.parametrize("args", [("--trainer.devices=1",), TWO_REPLICAS])
def test_debug_is_short_and_finds_nans(
    args: tuple[str, ...], fit: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert fit("--config=mode/debug.yaml", "--run_dir=run", *args) == 0
    assert "epoch 2/2" in capfd.readouterr().out and torch.are_deterministic_algorithms_enabled()
    assert load(tmp_path / "run")["global_step"] == 10
    theirs = LeNet.training_step

    def training_step(self: LeNet, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (theirs(self, batch, batch_idx) * 0).sqrt()  # its gradient is 0 / 0

    monkeypatch.setattr(LeNet, "training_step", training_step)
    with pytest.raises(RuntimeError, match=r"SqrtBackward0|MulBackward0' returned nan"):
        fit("--config=mode/debug.yaml", *args)


@pytest.mark.slow
def test_one_batch_is_learnt_by_heart(fit: Callable, tmp_path: Path) -> None:
    faster = ("--trainer.max_epochs=150", "--model.optimizer.lr=0.01")
    assert fit("--config=mode/overfit.yaml", *faster, "--run_dir=run", *TWO_REPLICAS) == 0
    assert load(tmp_path / "run")["global_step"] == 150  # one batch an epoch
    assert losses(tmp_path / "run")[-1] < 0.05


@pytest.mark.parametrize("args", [("--trainer.devices=1",), TWO_REPLICAS])
def test_deterministic_runs_are_bit_identical(args: tuple[str, ...], fit: Callable, tmp_path: Path) -> None:
    for run in ("a", "b"):
        config = ("--config=mode/deterministic.yaml", "--data.augment=true", "--trainer.max_epochs=2")
        os.environ.pop("PL_GLOBAL_SEED", None)
        assert fit(*config, f"--run_dir={run}", *args) == 0
    a, b = load(tmp_path / "a")["state_dict"], load(tmp_path / "b")["state_dict"]
    assert all(torch.equal(a[name], b[name]) for name in a)
