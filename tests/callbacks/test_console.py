"""Header, epoch lines and progress bar of all kinds of runs; what is in an epoch's time."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lightning_mgpu.allreduce import ring_allreduce
from lightning_mgpu.callbacks import (
    EpochLines,
    EpochTimer,
    LearningRates,
    RunHeader,
    epoch_timer,
)
from lightning_mgpu.devices import describe_devices
from lightning_mgpu.models import LeNet
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.callbacks.conftest import Named
from tests.conftest import run_devices


def test_a_header_then_one_line_per_epoch(
    make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    header, lines = RunHeader(), EpochLines()
    header.notes["wandb"] = "off"
    three = {"devices": 3, "strategy": "manual_allreduce", "max_epochs": 2}
    trainer = make_trainer(
        callbacks=[header, EpochTimer(), lines], enable_progress_bar=True, **three
    )
    data, model = make_data(), LeNet()
    trainer.fit(model, data)
    epochs = capsys.readouterr().out.splitlines()
    shown = dict(line.split(":", 1) for line in (epochs.pop(0) for _ in range(6)))
    assert list(shown) == ["model", "strategy", "batch", "data", "run", "wandb"]
    assert "LeNet, 129,068 parameters, precision 32-true" in shown["model"]
    assert shown["strategy"].endswith(f" on {describe_devices(run_devices(3))}")
    assert shown["batch"].strip() == "64 global, 21.3 per device"
    assert "402 train, 101 val, 107 test; files under" in shown["data"]
    assert shown["run"].strip() == str(tmp_path)
    assert [line[:11] for line in epochs] == ["epoch 1/2  ", "epoch 2/2  "]
    assert all(line.endswith(" s") for line in epochs)
    assert all(
        f"  {name} " in line
        for line in epochs
        for name in ("train_loss", "train_acc", "val_loss", "val_acc")
    )
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.test(model, data, verbose=False)
    assert capsys.readouterr().out == ""
    make_trainer(callbacks=[RunHeader()]).validate(model, data, tmp_path / "a.ckpt", verbose=False)
    assert f"ckpt:     {tmp_path / 'a.ckpt'}\n" in capsys.readouterr().out


def test_replicas_and_allreduce_are_named_and_short_runs_have_a_learning_rate(
    make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    strategy = ManualAllreduceStrategy(ring_allreduce, replicas=4)
    model = LeNet(lr_scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=99))
    callbacks = [RunHeader(), LearningRates()]
    trainer = make_trainer(
        callbacks=callbacks, strategy=strategy, devices=1, logger=CSVLogger(tmp_path, "", "")
    )
    trainer.fit(model, make_data())
    out = capsys.readouterr().out
    assert "64 global, 16 per replica" in out and "Strategy (ring_allreduce) on" in out
    assert "per_replica_batch_size: '16'" in (tmp_path / "hparams.yaml").read_text()
    assert "lr-SGD" in (tmp_path / "metrics.csv").read_text()


def test_epoch_lines_show_metrics_of_any_name(
    make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    def lines(*names: tuple[str, ...]) -> list[str]:
        loader = DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]
        trainer = make_trainer(callbacks=[EpochLines()], enable_progress_bar=True, max_epochs=2)
        trainer.fit(Named(*names), loader, loader)
        return capsys.readouterr().out.splitlines()

    first, second = lines(("g_loss",), ("train/loss", "other"), ("val/loss",))
    assert first == "epoch 1/2  train/loss 1.0000  val/loss 2.0000  g_loss 1.0000"
    assert second == "epoch 2/2  train/loss 1.0000  g_loss 1.0000"  # nothing was validated
    first, second = lines((), ("train_tokens_per_step", "per_epoch"), ("g_loss_epoch",))
    both = "train_tokens_per_step 1.0000"
    assert first == f"epoch 1/2  {both}" and second == f"epoch 2/2  {both}"
    first, second = lines((), ("per_epoch",), ("g_loss_epoch",))
    assert first == "epoch 1/2  per_epoch 1.0000  g_loss_epoch 2.0000"
    assert second == "epoch 2/2  per_epoch 1.0000"  # whatever the name of what was not validated
    assert lines((), ("g_loss", "d_loss"), ()) == [
        f"epoch {i}/2  g_loss 1.0000  d_loss 1.0000" for i in (1, 2)
    ]


def test_a_terminal_has_the_lines_above_a_bar_that_counts_from_one(
    make_data: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Bar(EpochLines):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            self.refresh(hard=True)

    class LogsMore(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            self.log("in_bar", float(batch_idx), prog_bar=True, on_epoch=True)
            self.log("not_in_bar", 1.0)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:  # called after the callbacks'
            self.log_dict({"train_late": 1.0, "not_in_line": 1.0})
            self.log("late_in_bar", 1.0, prog_bar=True)

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    screen = io.StringIO()
    bar = Bar()
    plain = {"force_terminal": True, "width": 200, "color_system": None}
    bar._console_kwargs = {"file": screen, **plain}
    options = {"log_every_n_steps": 2, "max_epochs": 2, "logger": CSVLogger(tmp_path)}
    make_trainer(enable_progress_bar=True, callbacks=[bar], **options).fit(LogsMore(), make_data())
    drawn = [line for part in screen.getvalue().split("\r") for line in part.splitlines()]
    lines = [
        line.partition("epoch ")[2] for line in drawn if "epoch " in line and "train_acc" in line
    ]
    assert [line.split()[0] for line in lines] == ["1/2", "2/2"]
    assert all(f"  {name} " in line for line in lines for name in ("val_loss", "train_late"))
    assert all("  late_in_bar 1" in line and "  in_bar 2" in line for line in lines)
    assert not any("not_in" in line or "step" in line for line in lines)
    bars = [line for line in drawn if "it/s" in line]
    assert any("epoch 1/2" in line for line in bars) and any("epoch 2/2" in line for line in bars)
    assert not any("epoch 0" in line or "Epoch" in line for line in bars)
    # the loss last logged, what has `prog_bar=True`, and no version number
    assert bars[-1].partition("it/s")[2].split()[::2] == [
        *("loss:", "in_bar_step:", "in_bar_epoch:", "late_in_bar:"),
    ]
    assert "loss: 2.3" in bars[-1] and "in_bar_step: 6.000" in bars[-1]


def test_every_process_reduces_before_the_module_may_communicate(
    make_data: Callable, make_trainer: Callable
) -> None:
    class Looks(LeNet):
        def on_train_epoch_end(self) -> None:
            self.is_reduced = self.train_loss._computed is not None

    lines, model = EpochLines(), Looks()
    lines.disable()  # as in all processes but the first
    make_trainer(callbacks=[lines], enable_progress_bar=True).fit(model, make_data())
    assert model.is_reduced


def test_timer_leaves_validation_out(
    make_data: Callable, make_trainer: Callable, monkeypatch: Any
) -> None:
    now = [0.0]

    class Steps(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            now[0] += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            now[0] += 100
            return super().validation_step(batch, batch_idx)

    monkeypatch.setattr(epoch_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer = EpochTimer()
    # in the middle of the epoch too
    trainer = make_trainer(max_epochs=2, callbacks=[timer], val_check_interval=3)
    trainer.fit(Steps(), make_data())
    assert timer.seconds == [7.0, 7.0] and timer.seconds_per_epoch == 7.0
    assert float(trainer.callback_metrics["epoch_seconds"]) == 7.0
