"""The shipped YAMLs at work: debugging, callbacks, the example to copy."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.models import LeNet
from tests.runs.conftest import last, metrics

ONE_DEVICE = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--run_dir=run")
REPLICAS = ("--trainer.strategy=manual_allreduce", "--trainer.strategy.replicas=2")
DATA = ("--data.val_size=101", "--data.batch_size=64")


@pytest.fixture
def fit(main: Callable[..., int], root: Path) -> Iterator[Callable[..., int]]:
    """Run `fit` with two replicas: 402 images to train on, 101 to validate."""
    given = (*ONE_DEVICE, *REPLICAS, f"--data.root={root}", *DATA)
    yield lambda name, *args: main("fit", *(name and [f"--config={name}"]), *given, *args)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def test_debug_is_short_and_finds_nans(
    fit: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert fit("debug/default.yaml") == 0
    assert "epoch 2/2" in capfd.readouterr().out and torch.are_deterministic_algorithms_enabled()
    assert last(Path("run"))["global_step"] == 10
    theirs = LeNet.training_step

    def training_step(self: LeNet, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (theirs(self, batch, batch_idx) * 0).sqrt()  # its gradient is 0 / 0

    monkeypatch.setattr(LeNet, "training_step", training_step)
    with pytest.raises(RuntimeError, match=r"(Sqrt|Mul)Backward0' returned nan"):
        fit("debug/default.yaml", "--run_dir=nan")


@pytest.mark.slow
def test_one_batch_is_learnt_by_heart(fit: Callable) -> None:
    """The batch is the same in every epoch: the images are not augmented."""
    adam = ("--model.init=kaiming", "--model.optimizer=Adam", "--model.optimizer.lr=0.01")
    data = ("--data.batch_size=8", "--data.augment=true", "--data.crop_padding=20")
    assert fit("debug/overfit.yaml", "--trainer.max_epochs=40", *adam, *data) == 0
    assert last(Path("run"))["global_step"] == 40  # one batch an epoch
    losses = [row["train_loss"] for row in metrics(Path("run")) if row["train_loss"]]
    assert float(losses[-1]) < 0.05


def test_the_example_to_copy_trains(fit: Callable) -> None:
    few = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
    short = ("--trainer.max_epochs=1", "--data.batch_size=8", *few)
    # BatchNorm over replicas needs a process for each
    assert fit("experiment/example.yaml", *short, "--trainer.sync_batchnorm=false") == 0
    assert last(Path("run"))["global_step"] == 2


def test_early_stopping_ends_a_run_that_learns_nothing(fit: Callable, capfd: Any) -> None:
    short = ("--trainer.max_epochs=9", "--trainer.limit_train_batches=1")
    assert fit("callbacks/early_stopping.yaml", "--model.lr=0", *short) == 0
    out = capfd.readouterr().out
    assert "epoch 4/9" in out and "epoch 5/9" not in out
    assert "stopped early: Monitored metric val_acc did not improve in the last 3 records" in out


def test_ema_changes_what_is_validated_tested_and_saved_but_not_the_training(fit: Callable) -> None:
    args = ("--trainer.max_epochs=2", "--model.init=kaiming", "--checkpoint.monitor=null")
    step = "--trainer.callbacks.update_starting_at_step=2"
    assert fit("", *args, "--run_dir=plain") == 0
    assert fit("callbacks/ema.yaml", step, *args, "--run_dir=ema") == 0
    plain, ema = (metrics(Path(name)) for name in ("plain", "ema"))
    for key, is_same in (("train_loss", True), ("val_loss", False), ("test_loss", False)):
        found = [[row[key] for row in rows if row[key]] for rows in (plain, ema)]
        assert found[0] and (found[0] == found[1]) is is_same, key
    weights, average = (last(Path(name))["state_dict"] for name in ("plain", "ema"))
    assert all(not weights[name].equal(average[name]) for name in weights)


def test_profile_sees_the_operators_of_all_replicas(fit: Callable) -> None:
    assert fit("debug/profile.yaml") == 0
    (row,) = re.findall(r"^ *aten::conv2d .*", Path("run/fit-profile.txt").read_text(), flags=re.M)
    assert int(row.split()[-1]) == 3 * 2 * 2  # batches, replicas, convolutions
