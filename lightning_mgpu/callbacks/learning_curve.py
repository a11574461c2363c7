"""The book's `Animator` without a notebook: the learning curve, a picture redrawn every epoch."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.console import epoch_metrics, metrics_so_far, quantity
from lightning_mgpu.callbacks.pictures import ending_no_run, save_picture

MOST_PANELS = 4  # losses first


class LearningCurve(Callback):
    """Draws metrics against epochs: `train_loss` and `val_loss` in one panel, and so on.

    The picture is `curve.png` in the run directory; W&B gets it at the end. The points are saved
    with checkpoints, so that a resumed run goes on drawing the same curve.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self) -> None:
        self.points: dict[
            str, list[tuple[int, float]]
        ] = {}  # (epoch from 1, value), by the metric's name
        self._before: dict[str, Tensor] = {}  # the epoch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = metrics_so_far(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in sorted(epoch_metrics(trainer, self._before).items()):
            if quantity(name):
                self.points.setdefault(name, []).append((trainer.current_epoch + 1, value))
        self._save(trainer, upload=False)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, upload=True)

    def _save(self, trainer: Trainer, upload: bool) -> None:
        if self.points:
            on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
            with ending_no_run("curve.png"):
                figure = draw(self.points, "test" if on_test_set else "validation")
                save_picture(trainer, figure, "curve.png", upload)


def draw(points: dict[str, list[tuple[int, float]]], validation: str) -> Figure:
    """A panel for everything measured; `validation` is how the lines of validation are labelled."""
    panels: dict[
        str, list[tuple[str, bool]]
    ] = {}  # names, and whether of validation, by what they measure
    for name in points:
        if found := quantity(name):
            panels.setdefault(found[0], []).append((name, found[1]))
    measured = sorted(panels, key=lambda what: ("loss" not in what, what))[:MOST_PANELS]
    figure = Figure(figsize=(4.2 * len(measured), 3.3), layout="constrained")
    for what, axes in zip(measured, figure.subplots(1, len(measured), squeeze=False)[0]):
        axes.set(xlabel="epoch", ylabel="accuracy" if what == "acc" else what)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.4)
        for name, of_validation in panels[what]:
            label = validation if of_validation else "training"
            axes.plot(*zip(*points[name]), "C1.-" if of_validation else "C0.-", label=label)
        axes.legend()
    return figure
