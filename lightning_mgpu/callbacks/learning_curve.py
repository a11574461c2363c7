"""The book's `Animator` for runs without a notebook: the learning curve as a picture, redrawn after every epoch."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from typing_extensions import override

from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics, quantity
from lightning_mgpu.callbacks.pictures import save_picture

MOST_PANELS = 4  # losses first


class LearningCurve(Callback):
    """Draws metrics of training and validation against epochs: `train_loss` and `val_loss` in one panel, and so on.

    The picture is `curve.png` in the run directory; W&B gets it at the end. The points are saved with checkpoints, so
    that a resumed run goes on drawing the same curve.

    Args:
        filename: Name of the picture, whose suffix picks the format (`.png`, `.svg`, `.pdf`).
    """

    def __init__(self, filename: str = "curve.png") -> None:
        self.filename = filename
        self.points: dict[str, list[tuple[int, float]]] = {}  # (epoch from 1, value), by the metric's name

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in sorted(epoch_metrics(trainer).items()):
            if quantity(name):
                self.points.setdefault(name, []).append((trainer.current_epoch + 1, value))
        if self.points:
            save_picture(trainer, self._draw(trainer), self.filename, upload=False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.points:
            save_picture(trainer, self._draw(trainer), self.filename)

    def _draw(self, trainer: Trainer) -> Figure:
        panels: dict[str, list[tuple[str, bool]]] = {}  # names, and whether of validation, by what they measure
        for name in self.points:
            if found := quantity(name):
                panels.setdefault(found[0], []).append((name, found[1]))
        measured = sorted(panels, key=lambda what: ("loss" not in what, what))[:MOST_PANELS]
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        labels = {False: "training", True: "test" if on_test_set else "validation"}
        last = max(trainer.max_epochs or 0, *(points[-1][0] for points in self.points.values()), 2)
        figure = Figure(figsize=(4.2 * len(measured), 3.3), layout="constrained")
        for what, axes in zip(measured, figure.subplots(1, len(measured), squeeze=False)[0]):
            axes.set(xlabel="epoch", ylabel={"acc": "accuracy"}.get(what, what), xlim=(1, last))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.4)
            for name, of_validation in panels[what]:
                epochs, values = zip(*self.points[name])
                style, marker = "C1-." if of_validation else "C0-", "." if len(epochs) == 1 else None
                axes.plot(epochs, values, style, marker=marker, label=labels[of_validation])
            axes.legend()
        return figure
