"""The learning curve, the confusion matrix, the grid of predictions: of the usual run, and of models of other kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.callbacks import ConfusionMatrix, LearningCurve, PredictionGrid
from lightning_mgpu.callbacks.confusion_matrix import draw
from lightning_mgpu.models import Classifier, LeNet


def is_png(path: Path) -> bool:
    with Image.open(path) as picture:
        picture.load()
        return picture.format == "PNG" and min(picture.size) > 100


class Times(Callback):
    """When the curve was last drawn, after every epoch."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, []  # type: ignore[var-annotated]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.times.append(self.path.stat().st_mtime_ns)


def panels(curve: LearningCurve, trainer: Trainer) -> dict[str, list[str]]:
    """What each panel of the curve shows, by its label."""
    return {axes.get_ylabel(): [line.get_label() for line in axes.lines] for axes in curve._draw(trainer).axes}


@pytest.mark.parametrize(("val_size", "label"), [(0, "test"), (101, "validation")])
def test_curve_is_redrawn_every_epoch(
    val_size: int, label: str, make_data: Callable, make_trainer: Callable, tmp_path: Path
) -> None:
    curve, times = LearningCurve(), Times(tmp_path / "curve.png")
    trainer = make_trainer(max_epochs=3, callbacks=[curve, times], check_val_every_n_epoch=2)
    trainer.fit(LeNet(), make_data(val_size=val_size))
    assert is_png(tmp_path / "curve.png") and len(set(times.times)) == 3
    names = ("train_loss", "train_acc", "val_loss", "val_acc")
    found = {name: [epoch for epoch, _ in points] for name, points in curve.points.items()}
    assert found == {name: [1, 2, 3] if "train" in name else [2] for name in names}  # values of their own epochs
    both = ["training", label]
    assert panels(curve, trainer) == {"loss": both, "accuracy": both}
    again = LearningCurve()
    again.load_state_dict(curve.state_dict())
    assert again.points == curve.points


def test_curve_draws_metrics_of_any_name(make_trainer: Callable) -> None:
    class Named(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(batch).sum()
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            self.log("lr", 0.1)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log_dict({"val/loss": 1.0, "val/mae": 2.0, "valid_f1": 3.0})

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), 0.1)

    curve, loader = LearningCurve(), DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]
    trainer = make_trainer(callbacks=[curve], max_epochs=-1, max_steps=12)
    trainer.fit(Named(), loader, loader)
    assert panels(curve, trainer) == {"loss": ["training", "validation"], "f1": ["validation"], "mae": ["validation"]}
    assert curve._draw(trainer).axes[0].get_xlim() == (1, 3)


def test_matrix_and_grid_are_of_the_test_set(make_data: Callable, make_trainer: Callable, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data, matrix = LeNet(), make_data(batch_size=25), ConfusionMatrix()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    trainer = make_trainer(callbacks=[matrix, PredictionGrid(num_images=11)])
    X, y = data.test_set[0, torch.arange(107)]
    expected = torch.zeros(10, 10, dtype=torch.long)
    with torch.no_grad():
        for label, prediction in zip(y.tolist(), model(X).argmax(1).tolist()):
            expected[label, prediction] += 1
    for _ in range(2):  # the second test starts from nothing
        trainer.test(model, data, verbose=False)
        assert matrix._metric is not None and torch.equal(matrix._metric.compute(), expected)
    assert expected.count_nonzero() > 10  # not all in one column
    assert is_png(tmp_path / "confusion.png") and is_png(tmp_path / "predictions.png")


def test_classes_are_named_with_their_share_of_right_answers() -> None:
    axes = draw(torch.tensor([[3, 1], [0, 0]]), ["shirt", "bag"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["shirt 75%", "bag 0%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["shirt", "bag"]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "0"]


def test_other_models_get_what_can_be_drawn(
    make_trainer: Callable, tmp_path: Path, VectorNet: type[Classifier], files: Callable
) -> None:
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
