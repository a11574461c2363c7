"""Whose checkpoints are a run's, where they go, and what a signal leaves behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning_mgpu.checkpoint_io import best_there_is

from lightning_mgpu.callbacks import RunCheckpoint
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.wandb_run import UploadBest


@pytest.fixture
def fit(make_data: Callable, make_trainer: Callable) -> Callable[..., Trainer]:
    """Train with a RunCheckpoint, two batches an epoch."""

    def run(checkpoint: RunCheckpoint, ckpt_path: Path | None = None, **kwargs: Any) -> Trainer:
        trainer = make_trainer(enable_checkpointing=True, limit_train_batches=2, callbacks=[checkpoint], **kwargs)
        trainer.fit(LeNet(), make_data(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_best_of_another_run_is_none_of_this_ones(is_moved: bool, fit: Callable, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    first = RunCheckpoint(dirpath=theirs, monitor="val_acc", mode="max")
    fit(first)
    best = Path(first.best_model_path)
    assert best.parent == theirs and best_there_is(first) == str(best)
    if is_moved:
        theirs = theirs.rename(ours)
    second = RunCheckpoint(dirpath=ours, monitor="val_acc", mode="max")
    fit(second, theirs / "last.ckpt")  # which has trained the one epoch
    assert best_there_is(second) == (str(ours / best.name) if is_moved else None)


def test_a_best_checkpoint_that_is_gone_is_not_uploaded(
    fit: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: list[Path] = []
    monkeypatch.setattr(UploadBest, "_log", lambda self, path, checkpoint: uploaded.append(path))
    checkpoint = RunCheckpoint(dirpath=tmp_path, monitor="val_acc", mode="max")
    trainer = fit(checkpoint)
    Path(checkpoint.best_model_path).unlink()
    with pytest.warns(UserWarning, match="is gone: the last one stands in"):
        UploadBest(None, seconds=10.0).on_fit_end(trainer, trainer.lightning_module)  # type: ignore[arg-type]
    assert uploaded == [tmp_path / "last.ckpt"]


def test_a_trainer_that_was_stopped_can_fit_again(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    class Stopped(LeNet):
        num_batches = 0

        def on_train_batch_start(self, *args: Any) -> None:
            self.num_batches += 1
            if self.num_batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    model, checkpoint = Stopped(), RunCheckpoint(dirpath=tmp_path)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[checkpoint])
    try:
        with pytest.raises(SystemExit):
            trainer.fit(model, make_data())
        assert model.num_batches == 2 and trainer.interrupted
        trainer.fit(model, make_data())
        assert model.num_batches > 3 and trainer.current_epoch == 1 and not trainer.interrupted
        assert {signum: signal.getsignal(signum) for signum in before} == before
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Stop(Callback):
    """As a `Timer`, or `EarlyStopping` in the middle of an epoch, does."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 4


CUT_SHORT: dict[str, dict[str, Any]] = {
    "callback": {},
    "steps": {"max_steps": 4, "max_epochs": -1},
    "steps, validation": {"max_steps": 4, "max_epochs": -1, "val_check_interval": 2},
    "callback, validation": {"val_check_interval": 2},
}


@pytest.mark.parametrize("how", CUT_SHORT)
def test_a_run_that_is_cut_short_keeps_what_it_has_trained(
    how: str, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    def train(name: str, ckpt_path: Path | None = None, **kwargs: Any) -> list[torch.Tensor]:
        checkpoint = RunCheckpoint(dirpath=tmp_path / name)
        stops = [Stop()] if "callback" in how and name == "short" else []
        limits = {"limit_train_batches": 6, "limit_val_batches": 1, "enable_checkpointing": True}
        trainer = make_trainer(callbacks=[checkpoint, *stops], **{**limits, **kwargs})
        seed_everything(1, verbose=False)
        trainer.fit(LeNet(), make_data(), ckpt_path=ckpt_path)
        assert trainer.global_step == (4 if name == "short" else 12)
        return [parameter.detach() for parameter in trainer.lightning_module.parameters()]

    weights = train("short", **{"max_epochs": 2, **CUT_SHORT[how]})
    last = tmp_path / "short" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] == 4 and all(map(torch.equal, saved["state_dict"].values(), weights))
    interval = {name: value for name, value in CUT_SHORT[how].items() if name == "val_check_interval"}
    gone_on = train("gone on", last, max_epochs=2, **interval)
    assert all(map(torch.equal, gone_on, train("in one go", max_epochs=2, **interval)))


def test_what_is_resumed_from_is_local(fit: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remote = "memory://bucket/x"
    with pytest.raises(UsageError, match=r"checkpoint\.dirpath=memory://bucket/x: .* --checkpoint\.save_last=false"):
        fit(RunCheckpoint(dirpath=remote))
    checkpoint = RunCheckpoint(dirpath=remote, save_last=False)
    trainer = fit(checkpoint)
    assert fsspec.filesystem("memory").isfile(checkpoint.best_model_path)
    trainer.test(ckpt_path=best_there_is(checkpoint), datamodule=trainer.datamodule, verbose=False)
    assert list(tmp_path.iterdir()) == []
