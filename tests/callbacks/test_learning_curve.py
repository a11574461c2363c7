"""The curve is drawn every epoch, of all epochs, and says what it shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lightning_mgpu.callbacks import LearningCurve
from lightning_mgpu.models import LeNet


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
