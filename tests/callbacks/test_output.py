"""Header, lines, curve and seconds of all kinds of runs."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_mgpu.allreduce import ring_allreduce
from lightning_mgpu.callbacks import RunOutput, curve
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.metrics import MetricsFile, read_rows
from lightning_mgpu.strategies import ManualAllreduceStrategy


@pytest.fixture
def trainer(make_trainer, tmp_path):
    """A Trainer with this package's output and `metrics.csv`."""

    def make(*callbacks, **options):
        (tmp_path / "metrics.csv").unlink(missing_ok=True)
        trainer = make_trainer(callbacks=[*callbacks], enable_checkpointing=True, **options)
        trainer.loggers = [MetricsFile(trainer, None)]
        return trainer

    return make


def test_a_header_then_one_line_per_epoch(make_data, trainer, capsys, tmp_path):
    output, data, model = RunOutput(), make_data(), LeNet()
    output.notes["wandb"] = "off"
    trainer(output, devices=3, strategy="dp", max_epochs=2).fit(model, data)
    epochs = capsys.readouterr().out.splitlines()
    shown = dict(line.split(":", 1) for line in (epochs.pop(0) for _ in range(6)))
    assert list(shown) == ["model", "strategy", "batch", "data", "run", "wandb"]
    assert "LeNet, 129,068 parameters, precision 32-true" in shown["model"]
    assert shown["strategy"].endswith(" on 3 x cpu")
    assert shown["batch"].strip() == "64 global, 21.3333 per replica"
    assert "402 train, 101 val, 107 test" in shown["data"]
    assert shown["run"].strip() == str(tmp_path)
    assert [line[:11] for line in epochs] == ["epoch 1/2  ", "epoch 2/2  "]
    assert all(line.endswith(" s") for line in epochs)
    names = ("train_loss", "train_acc", "val_loss", "val_acc")
    assert all(f"  {name} " in line for line in epochs for name in names)
    trainer(RunOutput(header=False)).test(model, data, verbose=False)
    assert capsys.readouterr().out == ""
    strategy = ManualAllreduceStrategy(ring_allreduce)
    trainer(RunOutput(), strategy=strategy).validate(model, data, verbose=False)
    assert "Strategy (ring_allreduce on gathered gradients) on" in capsys.readouterr().out


@pytest.mark.parametrize(("every", "warns"), [(14, False), (15, True)])
def test_a_run_of_too_few_steps_to_log_one(every, warns, make_data, trainer, recwarn):
    """Two epochs of seven steps, of which each alone is shorter."""
    run = trainer(RunOutput(), max_epochs=2, log_every_n_steps=every)
    run.fit(LeNet(), make_data())
    told = f"fewer steps than log_every_n_steps={every}: no step is logged"
    assert any(told in str(each.message) for each in recwarn) == warns
    rows = read_rows(Path(run.default_root_dir))
    assert any(row.get("loss") for row in rows) != warns
    run.test(LeNet(), make_data(), verbose=False)


class Named(LightningModule):
    """Logs under names of its own; in epochs 2 and 3 nothing is validated."""

    def __init__(
        self, in_bar: tuple[str, ...], others: tuple[str, ...], in_validation: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.in_bar, self.others, self.in_validation = in_bar, others, in_validation

    def training_step(self, batch, batch_idx):
        self.log_dict(dict.fromkeys(self.in_bar, 1.0), prog_bar=True, on_step=False, on_epoch=True)
        self.log_dict(dict.fromkeys(self.others, 1.0), on_step=True, on_epoch=True)
        return self.net(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log_dict(dict.fromkeys(self.in_validation, 2.0))

    def on_train_epoch_end(self):
        self.trainer.check_val_every_n_epoch = 4

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


def test_lines_show_metrics_of_any_name(trainer, capsys):
    def lines(*names):
        loader: Any = DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]
        trainer(RunOutput(header=False), max_epochs=2).fit(Named(*names), loader, loader)
        return [line.rpartition("  ")[0] for line in capsys.readouterr().out.splitlines()]

    first, second = lines(("g_loss",), ("train/loss", "other"), ("val/loss",))
    assert first == "epoch 1/2  train/loss 1.0000  val/loss 2.0000  g_loss 1.0000"
    assert second == "epoch 2/2  train/loss 1.0000  g_loss 1.0000"  # nothing was validated
    first, second = lines((), ("per_epoch",), ("g_loss_epoch",))
    assert first == "epoch 1/2  per_epoch 1.0000  g_loss_epoch 2.0000"
    assert second == "epoch 2/2  per_epoch 1.0000"  # whatever the name of what was not validated


def test_the_best_epoch_is_marked_at_the_end(make_data, trainer, monkeypatch):
    """It is the one that `fit` tests. The last one saved, without a metric, is not the best."""

    class BestInTheSecond(LeNet):
        def on_validation_epoch_end(self):
            self.log("val_loss", abs(self.current_epoch - 1.0))

    figures: list[Any] = []
    monkeypatch.setattr(curve, "save_picture", lambda _, figure, *__: figures.append(figure))
    for monitor, marks in (("val_loss", [[], [], ["best: epoch 2"]]), (None, [[], [], []])):
        figures.clear()
        short = {"limit_train_batches": 1, "max_epochs": 3}
        run = trainer(BestCheckpoint(monitor), RunOutput(), **short)
        run.fit(BestInTheSecond(), make_data())
        paths = [callback.best_model_path for callback in run.checkpoint_callbacks]
        assert Path(paths[0]).is_file() and paths[1:] == [""]
        legends = [axes.get_legend_handles_labels()[1] for f in figures for axes in f.axes[:1]]
        assert [[each for each in legend if "best" in each] for legend in legends] == marks


def test_what_the_module_logs_last_is_in_the_line_and_the_curve(
    make_data, trainer, capsys, monkeypatch
):
    """Points of the epochs that logged them; it is redrawn after every epoch and at the end."""

    class LogsLate(LeNet):
        def on_train_epoch_end(self):  # called after other callbacks' hooks
            self.log("train_late", float(self.current_epoch))

    drawn: list[dict[str, dict[int, float]]] = []
    monkeypatch.setattr(curve, "plot_curve", lambda points, *_: drawn.append(points))
    monkeypatch.setattr(curve, "save_picture", lambda *_: None)
    trainer(RunOutput(), max_epochs=3, check_val_every_n_epoch=2).fit(LogsLate(), make_data())
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [f"train_late {i}.0000" in line for i, line in enumerate(lines)] == [True] * 3
    assert ["val_acc" in line for line in lines] == [False, True, False]
    assert [points["train_late"] for points in drawn] == [{1: 0}, {1: 0, 2: 1}, {1: 0, 2: 1, 3: 2}]
    assert [*drawn[-1]["val_acc"]] == [2] and [*drawn[-1]["train_acc"]] == [1, 2, 3]


def test_seconds_are_of_training_only(make_data, trainer):
    class Sleeps(LeNet):
        def training_step(self, *args):
            time.sleep(0.05)
            return super().training_step(*args)

        def validation_step(self, *args):
            time.sleep(0.5)
            return super().validation_step(*args)

    output = RunOutput()
    trainer(output, val_check_interval=3, limit_train_batches=6).fit(Sleeps(), make_data())
    assert 0.3 <= output.seconds[0] < 2  # of 6 steps, without 4 batches of validation
