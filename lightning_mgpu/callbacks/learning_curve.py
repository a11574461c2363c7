"""The book's `Animator` for runs without a notebook: the learning curve as a picture, redrawn after every epoch."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from typing_extensions import override

from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing

LINES = {"train_loss": "-", "train_acc": "m--", "val_acc": "g-."}  # the book's line styles


class LearningCurve(Callback):
    """Draws training loss, training accuracy and validation (or test) accuracy against epochs.

    The picture is `curve.png` in the run directory; W&B gets it at the end. Metrics a model does not log are left out.
    The points are saved with checkpoints, so that a resumed run goes on drawing the same curve.

    Args:
        filename: Name of the picture, whose suffix picks the format (`.png`, `.svg`, `.pdf`).
    """

    def __init__(self, filename: str = "curve.png") -> None:
        self.filename = filename
        self.points: dict[str, list[tuple[int, float]]] = {name: [] for name in LINES}  # (epoch from 1, value)
        self._validated: int | None = None  # the last epoch that was: its values are there after the next ones, too

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = trainer.current_epoch

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        metrics = {name.replace("/", "_"): value for name, value in trainer.callback_metrics.items()}  # `train/loss`
        for name, points in self.points.items():
            is_new = not name.startswith("val_") or self._validated == trainer.current_epoch
            if is_new and name in metrics:
                points.append((epoch, float(metrics[name])))
        if any(self.points.values()) and (directory := run_directory(trainer)):
            self._draw(trainer, directory / self.filename)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (directory := run_directory(trainer)) and (path := directory / self.filename).exists():
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_image("curve", [str(path)])

    def _draw(self, trainer: Trainer, path: Path) -> None:
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axes = figure.add_subplot(xlabel="epoch", xlim=(1, max(trainer.max_epochs or 0, trainer.current_epoch + 1, 2)))
        axes.grid()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for name, style in LINES.items():
            if points := self.points[name]:
                label = name.replace("val", "test") if on_test_set else name
                axes.plot(*zip(*points), style, marker="." if len(points) == 1 else None, label=label.replace("_", " "))
        axes.legend()
        with replacing(path) as part:
            figure.savefig(part, dpi=120, format=path.suffix[1:])
