"""Everyday modes: debug, overfit, deterministic, and a batch that grows with the devices."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
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


@pytest.mark.parametrize("k", [1, 2, 3])
def test_batch_and_learning_rate_grow_with_the_devices(
    k: int, fit: Callable, main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    on_k = (f"--trainer.devices={k}", "--trainer.strategy=manual_allreduce")
    scaled = ("--config=experiment/scale_k.yaml", "--data.val_size=101")
    assert fit(*scaled, *on_k, "--trainer.max_epochs=1", "--run_dir=run") == 0
    out = capfd.readouterr().out
    assert f"scaled:   x {k}, the number of devices: batch_size 64 -> {64 * k}, lr 0.2 -> {0.2 * k:g}\n" in out
    assert f"batch:    {64 * k} global, 64 per device\n" in out
    checkpoint = load(tmp_path / "run")
    assert checkpoint["global_step"] == -(-402 // (64 * k))
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.2 * k)
    assert checkpoint["hyper_parameters"]["optimizer"]["init_args"]["lr"] == 0.2  # as given: scaled once, when used
    facts = yaml.safe_load((tmp_path / "run" / "hparams.yaml").read_text())
    assert (facts["scaled_by"], facts["lr"], facts["global_batch_size"]) == (k, pytest.approx(0.2 * k), 64 * k)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["scale_by_devices"] is True and config["data"]["init_args"]["batch_size"] == 64
    # from its checkpoint, and from its configuration: once again
    longer = ("--ckpt_path=run/checkpoints/last.ckpt", "--trainer.max_epochs=2", "--run_dir=longer")
    assert fit(*scaled, *on_k, *longer) == 0
    assert load(tmp_path / "longer")["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.2 * k)
    assert load(tmp_path / "longer")["global_step"] == 2 * checkpoint["global_step"]
    assert main("fit", "--config=run/config.yaml", "--run_dir=again") == 0
    again = load(tmp_path / "again")["state_dict"]
    assert all(torch.equal(again[name], value) for name, value in checkpoint["state_dict"].items())
    capfd.readouterr()
    tested = ("--ckpt_path=run/checkpoints/last.ckpt", f"--data.root={root}", "--data.batch_size=64")
    assert main("test", *tested, CPU, *on_k) == 0
    assert "batch:    64 global" in capfd.readouterr().out


@pytest.mark.slow
def test_a_scaled_runs_checkpoint_is_scaled_as_it_was(
    fit: Callable, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    once = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--run_dir=run")
    assert fit("--scale_by_devices=true", *TWO_REPLICAS, *once) == 0
    capfd.readouterr()
    begin = ("--ckpt_path=run/checkpoints/last.ckpt", "--trainer.max_epochs=2")
    assert fit(*begin, *TWO_REPLICAS, "--run_dir=longer") == 0  # says it no more
    assert "batch:    128 global" in capfd.readouterr().out
    assert load(tmp_path / "longer")["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.4)
    for other in ("--trainer.devices=1", "--scale_by_devices=false"):
        assert fit(*begin, *TWO_REPLICAS, other) == 2
        assert "its run multiplied batch and learning rate by 2, this one would by 1" in capfd.readouterr().err


@pytest.mark.slow
def test_scaling_under_ddp(command: Any, tmp_path: Path) -> None:
    args = (CPU, "--data.source=synthetic", "--trainer.devices=2", "--trainer.strategy=ddp", "--run_dir=run")
    brief = (*(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")), "--trainer.max_epochs=1")
    code, out, err = command("fit", "--config=experiment/scale_k.yaml", *args, *brief)
    assert code == 0 and "batch:    512 global, 256 per device" in out and "lr 0.2 -> 0.4" in out, err
    assert load(tmp_path / "run")["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.4)
