"""Run header, epoch times, learning curve, predictions: what is written, where, and nothing in a fast_dev_run."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import (
    ConfusionMatrix,
    EpochLines,
    EpochTimer,
    LearningCurve,
    LossBar,
    PredictionGrid,
    PredictionWriter,
    RunCheckpoint,
    RunHeader,
    epoch_timer,
    run_directory,
)
from lightning_mgpu.callbacks.console import per_device
from lightning_mgpu.models import Classifier, LeNet
from lightning_mgpu.run_dir import RUN_DIR


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


class Watch(Callback):
    """When the curve was last drawn, after every epoch."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, []  # type: ignore[var-annotated]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.times.append(self.path.stat().st_mtime_ns)


def test_curve_is_a_picture_redrawn_every_epoch(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    curve, watch = LearningCurve(), Watch(tmp_path / "curve.png")
    make_trainer(max_epochs=3, callbacks=[curve, watch]).fit(LeNet(), make_data())
    with Image.open(tmp_path / "curve.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.size[0] > 300
    assert len(set(watch.times)) == 3
    assert {name: [epoch for epoch, _ in points] for name, points in curve.points.items()} == {
        name: [1, 2, 3] for name in ("train_loss", "train_acc", "val_acc")
    }
    again = LearningCurve()
    again.load_state_dict(curve.state_dict())
    assert again.points == curve.points


@pytest.mark.parametrize(("val_size", "label"), [(0, "test acc"), (101, "val acc")])
def test_curve_says_what_was_validated_on(
    make_data: Callable,
    make_trainer: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    val_size: int,
    label: str,
) -> None:
    labels: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda *args, label, **kwargs: labels.append(label))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda self: None)
    make_trainer(callbacks=[LearningCurve()]).fit(LeNet(), make_data(val_size=val_size))
    assert labels == ["train loss", "train acc", label]


def test_curve_takes_names_with_slashes(make_data: Callable, make_trainer: Callable) -> None:
    class Named(LeNet):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            super().log(name.replace("_", "/"), *args, **kwargs)

    curve = LearningCurve()
    make_trainer(callbacks=[curve]).fit(Named(), make_data())
    assert [len(points) for points in curve.points.values()] == [1, 1, 1]


@pytest.mark.parametrize(("limits", "last"), [({"max_epochs": -1, "max_steps": 3}, 3), ({"max_epochs": 4}, 4)])
def test_curve_shows_all_epochs(
    limits: dict[str, int],
    last: int,
    make_data: Callable,
    make_trainer: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The axis ends with the last epoch there is, or there will be."""
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda self: seen.append(self.get_xlim()))
    make_trainer(callbacks=[LearningCurve()], limit_train_batches=1, **limits).fit(LeNet(), make_data())
    assert seen[-1] == (1, last)


def test_timer_leaves_validation_out(
    make_data: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
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
    trainer = make_trainer(max_epochs=2, callbacks=[timer], val_check_interval=3)  # in the middle of the epoch too
    trainer.fit(Steps(), make_data())
    assert timer.seconds == [7.0, 7.0] and timer.seconds_per_epoch == 7.0
    assert float(trainer.callback_metrics["epoch_seconds"]) == 7.0
    assert float(trainer.callback_metrics["samples_per_sec"]) == pytest.approx(402 / 7)
    assert time.perf_counter() != now[0]


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


def test_prediction_grid(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    make_trainer(callbacks=[PredictionGrid(num_images=11)]).test(LeNet(), make_data(), verbose=False)
    with Image.open(tmp_path / "predictions.png") as picture:
        picture.load()
        assert picture.format == "PNG" and picture.size[0] > picture.size[1] > 100


class VectorNet(Classifier):
    """Of vectors (N, 4), which are no images."""

    def __init__(self) -> None:
        super().__init__(num_classes=3)
        self.net = nn.Linear(4, 3)


def test_other_models_get_no_grid(make_trainer: Callable, tmp_path: Path) -> None:
    class OfDicts(VectorNet):
        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
            return super().test_step((batch["X"], batch["y"]), batch_idx)

    class OfPixels(VectorNet):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return {"logits": batch[0]}

    X, y = torch.zeros(6, 4), torch.arange(6) % 3
    sparse = [{"X": row, "y": label} for row, label in zip(X, y)]
    images = torch.zeros(6, 3, 5, 5)
    for model, samples, has_matrix in (
        (VectorNet(), TensorDataset(X, y), True),
        (OfDicts(), sparse, False),
        (OfPixels(), TensorDataset(images, images[:, 0].long()), False),  # a class for every pixel
    ):
        trainer = make_trainer(callbacks=[PredictionGrid(), ConfusionMatrix()])
        trainer.test(model, DataLoader(samples, 4), verbose=False)  # type: ignore[arg-type]
        assert files(tmp_path) == ({"confusion.png"} if has_matrix else set())
        (tmp_path / "confusion.png").unlink(missing_ok=True)


@pytest.mark.parametrize("label", [-100, 9])
def test_a_grid_names_what_has_a_name(label: int, make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    class Wide(LeNet):
        def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            logits = torch.arange(12.0).expand(len(batch[1]), 12)  # the last class, which has no name
            batch[1].fill_(label)
            return {"logits": logits}

    make_trainer(callbacks=[PredictionGrid()]).test(Wide(), make_data(), verbose=False)
    assert files(tmp_path) == ({"predictions.png"} if label == 9 else set())


def test_predictions_in_dataset_order(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(0)
    data, model = make_data(batch_size=25), LeNet()  # 107 samples: batches of 22, 22, 21, 21, 21
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    make_trainer(callbacks=[PredictionWriter()]).predict(model, data, return_predictions=False)
    assert capsys.readouterr().out == f"predictions: {tmp_path / 'predictions.csv'}\n"
    with (tmp_path / "predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:3] == ["index", "label", "prediction"] and header[3] == "p(T-shirt/top)" and len(header) == 13
    X, y = data.test_set[0, torch.arange(107)]
    with torch.no_grad():
        probabilities = model(X).softmax(1)
    assert [int(row[0]) for row in rows] == list(range(107))
    assert [int(row[1]) for row in rows] == y.tolist()
    assert [int(row[2]) for row in rows] == probabilities.argmax(1).tolist()
    assert torch.allclose(torch.tensor([[float(p) for p in row[3:]] for row in rows]), probabilities, atol=1e-5)


def test_predictions_of_any_loader_in_dataset_order(make_trainer: Callable, tmp_path: Path) -> None:
    samples = TensorDataset(torch.randn(23, 4), torch.arange(23))
    trainer = make_trainer(callbacks=[PredictionWriter()])
    trainer.predict(VectorNet(), DataLoader(samples, 5, shuffle=True))
    written = (tmp_path / "predictions.csv").read_text().splitlines()
    assert written[0] == "index,label,prediction,p(0),p(1),p(2)"
    assert [line.split(",")[:2] for line in written[1:]] == [[str(i), str(i)] for i in range(23)]
    trainer.predict(VectorNet(), DataLoader([samples[7:12]], batch_size=None))  # of which nothing is known
    written = (tmp_path / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in written[1:]] == [[str(i), str(7 + i)] for i in range(5)]


@pytest.mark.parametrize("returned", ["tensor", "half", "sum"])
def test_a_model_without_a_row_a_sample_is_told_so(
    returned: str, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    class Bare(LeNet):
        def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
            table = super().predict_step(batch, batch_idx)
            if returned == "half":
                return {key: value[::2] for key, value in table.items()}
            return {**table, "label": batch[1].sum()} if returned == "sum" else table["probabilities"]

    with pytest.warns(UserWarning, match=r"predictions\.csv is not written: it needs .* a Bare\.predict_step that"):
        predictions = make_trainer(callbacks=[PredictionWriter()]).predict(Bare(), make_data())
    assert len(predictions) == 2 and files(tmp_path) == set()


def test_fast_dev_run_writes_nothing(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    callbacks = [RunHeader(), EpochTimer(), LearningCurve(), PredictionGrid(), PredictionWriter()]
    trainer = make_trainer(fast_dev_run=True, callbacks=callbacks)
    data, model = make_data(), LeNet()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data)
    assert run_directory(trainer) is None and files(tmp_path) == set()


def test_run_directory_is_the_loggers(make_trainer: Callable, tmp_path: Path) -> None:
    trainer = make_trainer(logger=CSVLogger(tmp_path / "logs", name="", version=""))
    assert run_directory(trainer) == tmp_path / "logs" and (tmp_path / "logs").is_dir()


def test_run_directory_is_the_command_lines_whatever_the_logger(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit() -> tuple[Path | None, str | None]:
        checkpoint = RunCheckpoint()
        trainer = make_trainer(
            logger=CSVLogger(tmp_path / "logs", name="", version=""),
            callbacks=[checkpoint],
            default_root_dir=tmp_path / "run",
            enable_checkpointing=True,
        )
        trainer.fit(LeNet(), make_data())
        return run_directory(trainer), checkpoint.dirpath

    assert fit() == (tmp_path / "logs", str(tmp_path / "logs" / "checkpoints"))
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    assert fit() == (tmp_path / "run", str(tmp_path / "run" / "checkpoints"))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file() and (tmp_path / "logs" / "metrics.csv").is_file()


def test_a_process_waits_for_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the GPU of another process opens a context there: hundreds of MB, or an error if it is exclusive."""
    gpus = [torch.device("cuda", i) for i in range(2)]
    waited: list[Any] = []
    monkeypatch.setattr(epoch_timer, "synchronize", waited.append)
    for strategy in (
        SimpleNamespace(root_device=gpus[1], parallel_devices=gpus, world_size=2),  # ddp's second process
        SimpleNamespace(root_device=gpus[0], parallel_devices=gpus, world_size=1),
        SimpleNamespace(root_device=gpus[0]),
    ):
        EpochTimer().on_train_epoch_start(SimpleNamespace(strategy=strategy), None)  # type: ignore[arg-type]
    assert waited == [gpus[1:], gpus, gpus[:1]]


def test_progress_bar_shows_the_loss_last_logged(make_data: Callable, make_trainer: Callable) -> None:
    shown: list[float] = []

    class Bar(LossBar):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            shown.append(self.get_metrics(trainer, pl_module).get("loss", 0.0))

    make_trainer(enable_progress_bar=True, callbacks=[Bar()], log_every_n_steps=2).fit(LeNet(), make_data())
    assert len(shown) == 7 and shown[0] == 0.0
    assert shown[1] == pytest.approx(2.3, abs=0.1) and shown[1] == shown[2] != shown[3]
