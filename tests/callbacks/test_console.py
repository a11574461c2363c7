"""What the header, the lines and the progress bar show, of the usual run and of others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_mgpu.callbacks import EpochLines, EpochTimer, LossBar, RunHeader
from lightning_mgpu.callbacks.console import per_device, run_facts
from lightning_mgpu.models import Classifier, LeNet


def test_header_tells_what_runs(
    make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    header = RunHeader()
    header.notes["wandb"] = "off"
    trainer = make_trainer(callbacks=[header])
    data, model = make_data(), LeNet()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["model", "strategy", "batch", "data", "run", "wandb"]  # once, not again by test
    assert "LeNet, 129,068 parameters, precision 32-true" in lines["model"]
    assert lines["strategy"].strip() == "SingleDeviceStrategy on [device(type='cpu')]"
    assert lines["batch"].strip() == "64 global, 64 per device"
    assert "402 train, 101 val, 107 test; files under" in lines["data"]
    assert lines["run"].strip() == str(tmp_path)


def test_per_device_batch_says_when_it_is_uneven() -> None:
    shown = (per_device(256, [1, 1]), per_device(256, [1, 1, 1]), per_device(2, [1, 1, 1]), per_device(256, [0.7, 0.3]))
    assert shown == ("128", "85 to 86", "0 to 1", "179 and 77")


def test_epoch_lines(make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture) -> None:
    make_trainer(max_epochs=2, callbacks=[EpochTimer(), EpochLines()], enable_progress_bar=True).fit(
        LeNet(), make_data()
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 1/2  ") and second.startswith("epoch 2/2  ")
    assert all(f"{name} " in second for name in ("train_loss", "train_acc", "val_loss", "val_acc"))
    assert second.endswith(" s")


def test_progress_bar_shows_the_loss_last_logged(make_data: Callable, make_trainer: Callable) -> None:
    shown: list[float] = []

    class Bar(LossBar):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            shown.append(self.get_metrics(trainer, pl_module).get("loss", 0.0))

    make_trainer(enable_progress_bar=True, callbacks=[Bar()], log_every_n_steps=2).fit(LeNet(), make_data())
    assert len(shown) == 7 and shown[0] == 0.0
    assert shown[1] == pytest.approx(2.3, abs=0.1) and shown[1] == shown[2] != shown[3]


def test_lazy_layers_are_not_counted(make_trainer: Callable) -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(10))

    trainer, model = make_trainer(), Lazy()
    assert run_facts(trainer, model)["num_parameters"] == 9
    assert RunHeader().lines(trainer, model)["model"].startswith("Lazy, 9 parameters and 2 lazy ones of unknown size, ")


@pytest.mark.parametrize(("limits", "begin"), [({}, "epoch 1/1  "), ({"max_epochs": -1, "max_steps": 2}, "epoch 1  ")])
def test_epoch_lines_name_the_last_epoch_where_it_is_known(
    limits: dict[str, int], begin: str, make_data: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    trainer = make_trainer(callbacks=[EpochLines()], enable_progress_bar=True, limit_train_batches=2, **limits)
    trainer.fit(LeNet(), make_data())
    assert capsys.readouterr().out.startswith(begin)


class Named(LightningModule):
    """Logs under names of its own; in epoch 2 nothing is validated."""

    def __init__(self, **names: bool) -> None:
        super().__init__()
        self.net, self.names = nn.Linear(1, 1), names

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for name, prog_bar in self.names.items():
            if not name.startswith(("val/", "valid")):
                self.log(name, 1.0, prog_bar=prog_bar, on_step=False, on_epoch=True)
        return self.net(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for name, prog_bar in self.names.items():
            if name.startswith(("val/", "valid")):
                self.log(name, 2.0, prog_bar=prog_bar)

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        (("train/loss", "val/loss", "other"), "val/loss 2.0000  train/loss 1.0000", "train/loss 1.0000"),
        (("g_loss*", "valid_f1*", "other"), "valid_f1 2.0000  g_loss 1.0000", "g_loss 1.0000"),
        (("value_loss*", "trainer/x"), "value_loss 1.0000", "value_loss 1.0000"),
        (("g_loss", "d_loss"), "g_loss 1.0000  d_loss 1.0000", "g_loss 1.0000  d_loss 1.0000"),
    ],
)
def test_epoch_lines_show_metrics_of_any_name(
    names: tuple[str, ...], first: str, second: str, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    trainer = make_trainer(callbacks=[EpochLines()], enable_progress_bar=True, max_epochs=2)
    module = Named(**{name.strip("*"): name.endswith("*") for name in names})
    loader = DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]
    module.on_train_epoch_end = lambda: setattr(trainer, "check_val_every_n_epoch", 3)  # type: ignore[method-assign]
    trainer.fit(module, loader, loader)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"epoch 1/2  {first}", f"epoch 2/2  {second}"]


class Plain(LightningDataModule):
    """With a loader Lightning hands every process batches of its own from."""

    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(16), self.batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "plain", "expected"),
    [
        ("ddp", True, "8 global, 4 per device"),
        ("ddp", False, "64 global, 32 per device"),
        ("manual_allreduce", True, "4 global, 2 per device"),
    ],
)
def test_the_batch_is_the_one_trained_on(
    strategy: str, plain: bool, expected: str, make_data: Callable, make_trainer: Callable
) -> None:
    trainer, header, model = make_trainer(strategy=strategy, devices=2), RunHeader(), LeNet()
    trainer.datamodule = Plain() if plain else make_data()
    header.setup(trainer, model, "fit")
    assert header.lines(trainer, model)["batch"] == expected
