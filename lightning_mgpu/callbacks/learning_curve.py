"""The book's `Animator` without a notebook: the learning curve, a picture redrawn every epoch."""

from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics, metrics_so_far, split_metric_name
from lightning_mgpu.callbacks.figures import picture_errors_as_warnings, save_picture
from lightning_mgpu.protocols import data_facts

Points = dict[str, list[tuple[int, float]]]
"""By the metric's name: (epoch from 1, value)."""


class LearningCurve(Callback):
    """Draws metrics against epochs: `train_loss` and `val_loss` in one panel, and so on.

    The picture is `curve.png` in the run directory; W&B gets it at the end. The points are saved
    with checkpoints, so that a resumed run goes on drawing the same curve.

    Args:
        max_panels: How many metrics are drawn at most; losses come first.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self, max_panels: PositiveInt = 4) -> None:
        self.max_panels = max_panels
        self.points: Points = {}
        self._metrics_before: dict[str, Tensor] = {}  # logged before the epoch
        self._finished_epoch: int | None = None  # from 1, until the next epoch starts
        self._trainer: Trainer

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    @override
    def state_dict(self) -> dict[str, Any]:
        self._add_points()  # `last.ckpt` is saved just before on_train_epoch_start
        return {"points": self.points}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._finished_epoch is not None:
            self.on_train_end(trainer, pl_module)
            self._save(upload=False)
        self._metrics_before = metrics_so_far(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished_epoch = trainer.current_epoch + 1

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_points()
        self._finished_epoch = None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(upload=True)

    def _add_points(self) -> None:
        """Add those of the finished epoch that are not there yet."""
        if self._finished_epoch is None:
            return
        metrics = epoch_metrics(self._trainer, self._metrics_before)
        for name in sorted(filter(split_metric_name, metrics)):
            points = self.points.setdefault(name, [])
            if not points or points[-1][0] != self._finished_epoch:
                points.append((self._finished_epoch, metrics[name]))

    def _save(self, upload: bool) -> None:
        if self.points:
            on_test_set = data_facts(self._trainer).validates_on_test_set
            with picture_errors_as_warnings("curve.png"):
                validation_label = "test" if on_test_set else "validation"
                figure = plot_curve(self.points, validation_label, self.max_panels)
                save_picture(self._trainer, figure, "curve.png", upload)


def plot_curve(points: Points, validation_label: str, max_panels: int) -> Figure:
    """One panel per metric, with a line for training and one for validation."""
    names_by_metric: dict[str, list[tuple[str, bool]]] = {}
    for name in points:
        if split := split_metric_name(name):
            names_by_metric.setdefault(split.metric, []).append((name, split.is_validation))
    metrics = sorted(names_by_metric, key=lambda metric: ("loss" not in metric, metric))
    metrics = metrics[:max_panels]
    figure = Figure(figsize=(4.2 * len(metrics), 3.3), layout="constrained")
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0]):
        axes.set(xlabel="epoch", ylabel="accuracy" if metric == "acc" else metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.4)
        for name, is_validation in names_by_metric[metric]:
            label, style = (validation_label, "C1.-") if is_validation else ("training", "C0.-")
            axes.plot(*zip(*points[name]), style, label=label)
        axes.legend()
    return figure
