"""Curve, confusion matrix, images and predictions.csv of the usual run and of other models."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import LearningCurve, PredictionWriter, TestPictures, pictures
from lightning_mgpu.callbacks.learning_curve import plot_curve
from lightning_mgpu.models import Classifier, LeNet
from tests.callbacks.conftest import Named


def panels(curve: LearningCurve) -> dict[str, list[str]]:
    """Panel of the curve -> labels of its lines."""
    return {
        axes.get_ylabel(): [line.get_label() for line in axes.lines]
        for axes in plot_curve(curve.points, "other", curve.max_panels).axes
    }


def epochs_of(points: dict[str, list[tuple[int, float]]]) -> dict[str, list[int]]:
    return {name: [epoch for epoch, _ in values] for name, values in points.items()}


class SavesFirst(Callback):
    """Saves where `LastCheckpoint` does, which is in front of the other callbacks."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "a.ckpt"))


@pytest.mark.parametrize(
    "every",
    [{"check_val_every_n_epoch": 2}, {"val_check_interval": 14, "check_val_every_n_epoch": None}],
)
def test_curve_is_redrawn_every_epoch(
    every: dict[str, Any], make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    class LogsLate(LeNet):
        def on_train_epoch_start(self) -> None:  # called after the callbacks' hooks, as all here
            super().on_train_epoch_start()
            if self.current_epoch:
                (tmp_path / "curve.png").rename(tmp_path / f"{self.current_epoch}.png")

        def on_train_epoch_end(self) -> None:
            self.log("train_late", float(self.current_epoch))

    curve = LearningCurve()
    trainer = make_trainer(max_epochs=3, callbacks=[SavesFirst(), curve], **every)
    trainer.fit(LogsLate(), make_data())
    assert all(
        (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in (1, 2, "curve")
    )
    names = ("train_loss", "train_acc", "train_late", "val_loss", "val_acc")
    # values of their own epochs
    expected = {name: [1, 2, 3] if "train" in name else [2] for name in names}
    assert epochs_of(curve.points) == expected
    assert [value for _, value in curve.points["train_late"]] == [0, 1, 2]
    expected = {name: [1, 2] if "train" in name else [2] for name in names}
    saved = torch.load(tmp_path / "a.ckpt")["callbacks"]["LearningCurve"]["points"]
    assert epochs_of(saved) == expected  # all of the epochs that were over
    both = ["training", "other"]
    assert panels(curve) == {"loss": both, "accuracy": both, "late": ["training"]}


def test_curve_draws_metrics_of_any_name(make_trainer: Callable) -> None:
    model = Named((), ("train/loss", "lr"), ("val/loss", "val/mae", "valid_f1"))
    curve, loader = LearningCurve(), DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]
    make_trainer(callbacks=[curve], max_epochs=-1, max_steps=12).fit(model, loader, loader)
    assert panels(curve) == {"loss": ["training", "other"], "f1": ["other"], "mae": ["other"]}
    curve.max_panels = 2
    assert [*panels(curve)] == ["loss", "f1"]


@pytest.fixture
def lively() -> LeNet:
    """Its weights are so large that it predicts every class."""
    torch.manual_seed(0)
    model = LeNet()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_matrix_and_grid_are_of_the_test_set(
    lively: LeNet, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    data, callback = make_data(batch_size=25), TestPictures()
    trainer = make_trainer(callbacks=[callback])
    X, y = data.test_set[0, torch.arange(107)]
    expected = torch.zeros(10, 10, dtype=torch.long)
    with torch.no_grad():
        for label, prediction in zip(y.tolist(), lively(X).argmax(1).tolist()):
            expected[label, prediction] += 1
    for _ in range(2):  # the second test starts from nothing
        trainer.test(lively, data, verbose=False)
        assert callback._confusion is not None
        assert torch.equal(callback._confusion.compute().cpu(), expected)
    assert expected.count_nonzero() > 10  # not all in one column
    assert all(
        (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        for name in ("confusion.png", "predictions.png")
    )


class VectorNet(Classifier):
    """Predicts vectors (N, 4), in batches of any kind."""

    def __init__(self) -> None:
        super().__init__(num_classes=3)
        self.net = nn.Linear(4, 3)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return super().test_step(
            (batch["X"], batch["y"]) if isinstance(batch, dict) else batch, batch_idx
        )


def test_other_models_get_what_can_be_drawn(make_trainer: Callable, tmp_path: Path) -> None:
    rows, classes = torch.zeros(6, 4), torch.arange(6) % 3
    trainer = make_trainer(callbacks=[TestPictures()])
    dicts: Any = [{"X": row, "y": label, "weight": 1.0} for row, label in zip(rows, classes)]
    trainer.test(VectorNet(), DataLoader(dicts, 4), verbose=False)
    assert list(tmp_path.iterdir()) == []
    trainer.test(VectorNet(), DataLoader(TensorDataset(rows, classes), 4), verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.png"]


def test_predictions_in_dataset_order(
    lively: LeNet,
    make_data: Callable,
    make_trainer: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    data = make_data(batch_size=25)  # 107 samples: batches of 22, 22, 21, 21, 21
    make_trainer(callbacks=[PredictionWriter()]).predict(lively, data, return_predictions=False)
    assert capsys.readouterr().out == f"predictions: {tmp_path / 'predictions.csv'}\n"
    with (tmp_path / "predictions.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert (
        header[:3] == ["index", "label", "prediction"]
        and header[3] == "p(T-shirt/top)"
        and len(header) == 13
    )
    X, y = data.test_set[0, torch.arange(107)]
    with torch.no_grad():
        probabilities = lively(X).softmax(1)
    assert [int(row[0]) for row in rows] == list(range(107))
    assert [int(row[1]) for row in rows] == y.tolist()
    assert [int(row[2]) for row in rows] == probabilities.argmax(1).tolist()
    assert torch.allclose(
        torch.tensor([[float(p) for p in row[3:]] for row in rows]), probabilities, atol=1e-5
    )


def test_no_picture_ends_a_run(
    make_trainer: Callable, tmp_path: Path, recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label of -100 is in no class; 7 classes are too many here; a wrong label is a warning."""
    figures: dict[str, Figure] = {}

    def save_picture(trainer: Any, figure: Figure, filename: str) -> None:
        figures[filename] = figure

    monkeypatch.setattr(pictures, "save_picture", save_picture)
    X, y = torch.rand(6, 1, 28, 28), torch.tensor([-100, 1, 2, 3, -100, 5])
    for num_classes, names in ((6, ["predictions.png", "confusion.png"]), (7, ["predictions.png"])):
        figures.clear()
        callback = TestPictures(num_images=2, max_classes=6)
        loader = DataLoader(TensorDataset(X, y), 3)
        make_trainer(callbacks=[callback]).test(LeNet(num_classes=num_classes), loader)
        assert list(figures) == names and len(figures["predictions.png"].axes) == 2
        assert callback._confusion is None or callback._confusion.confmat.sum() == 4
    assert not [each for each in recwarn if "is not right" in str(each.message)]

    class OnlyLogits(LeNet):
        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return {"logits": self(batch[0])}

    trainer = make_trainer(callbacks=[TestPictures()])
    with pytest.warns(UserWarning, match="predictions.png is not right: IndexError"):
        trainer.test(OnlyLogits(), DataLoader(TensorDataset(X, torch.full((6,), 70)), 3))


@pytest.mark.parametrize("num_tensors", [1, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_images_without_labels(
    num_tensors: int, devices: int, lively: LeNet, make_trainer: Callable, tmp_path: Path
) -> None:
    """Batches are X, (X,) or (X, y); two images are not taken for a pair."""
    X = torch.rand(6, 1, 28, 28)
    labels = [torch.arange(6)] * (num_tensors - 1)
    tables = []
    for dataset in (TensorDataset(X, *labels), list(X)):
        strategy = {"devices": devices, "strategy": "manual_allreduce"}
        trainer = make_trainer(callbacks=[PredictionWriter()], **(strategy if devices > 1 else {}))
        trainer.predict(lively, DataLoader(dataset, 2))  # type: ignore[arg-type]
        with (tmp_path / "predictions.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
    expected = list("012345") if labels else [None] * 6
    assert [row.pop("label", None) for row in tables[0]] == expected
    assert tables[0] == tables[1]
    assert [int(row["prediction"]) for row in tables[1]] == lively(X).argmax(1).tolist()


def test_tensors_of_any_loader_in_dataset_order(make_trainer: Callable, tmp_path: Path) -> None:
    class Chosen(VectorNet):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.choose(batch[0])

    samples = TensorDataset(torch.arange(92.0).reshape(23, 4), torch.arange(23))
    trainer, model = make_trainer(callbacks=[PredictionWriter()]), Chosen()
    flat = ["index,prediction", *(f"{i},{4 * i}" for i in range(23))]
    wide = ["index,prediction(0),prediction(1)", *(f"{i},{4 * i},{4 * i + 1}" for i in range(23))]
    for model.choose, wanted in ((lambda X: X[:, 0], flat), (lambda X: X[:, :2], wide)):
        trainer.predict(model, DataLoader(samples, 5, shuffle=wanted is flat))
        assert (tmp_path / "predictions.csv").read_text().splitlines() == wanted
    # an integer beyond a float's, more digits than six, each precision with its own
    columns = {
        "id": torch.tensor([2**63 - 1, -(2**53) - 1]),
        "half": torch.tensor([0.1, 2048.0]).half(),
        "single": torch.tensor([0.1, 1234567.0]),
        "double": torch.tensor([0.1, 1 / 3], dtype=torch.float64),
        "flag": torch.tensor([True, False]),
    }
    model.choose = lambda X: columns
    trainer.predict(model, DataLoader(TensorDataset(torch.zeros(2, 4)), 2))
    assert (tmp_path / "predictions.csv").read_text().splitlines() == [
        "index,id,half,single,double,flag",
        "0,9223372036854775807,0.1,0.1,0.1,1",
        "1,-9007199254740993,2048,1234567,0.3333333333333333,0",
    ]
    (tmp_path / "predictions.csv").unlink()
    with pytest.warns(UserWarning, match="one loader that says which samples are in a batch"):
        trainer.predict(model, DataLoader([samples[7:12]], batch_size=None))
    model.choose = lambda X: {"label": X[::2]}
    with pytest.warns(
        UserWarning, match=r"predictions\.csv is not written: .*, and a Chosen\.predict_step that"
    ):
        trainer.predict(model, DataLoader(samples, 5))
    assert not list(tmp_path.iterdir())
