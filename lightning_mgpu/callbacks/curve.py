"""The book's `Animator` without a notebook: the learning curve, redrawn after every epoch."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.metrics import STAGE_AND_METRIC, Points, read_points
from lightning_mgpu.tools import errors_as_warnings, replacing


def draw_curve(trainer: Trainer, upload: bool) -> None:
    """Draw `curve.png` from `metrics.csv`; at the end, mark the best epoch and show it in W&B."""
    if not trainer.is_global_zero:
        return
    with errors_as_warnings("curve.png"):
        points = read_points(Path(trainer.default_root_dir))
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        if points:
            ours = (each for each in trainer.callbacks if isinstance(each, BestCheckpoint))  # type: ignore[attr-defined]
            best = next((each.best for each in ours if upload and each.monitor), {})
            label = "test" if on_test_set else "validation"
            save_picture(trainer, plot_curve(points, label, best), "curve.png", upload)


def plot_curve(points: Points, validation_label: str, best: dict[str, Any]) -> Figure:
    """One panel per metric, losses first, with a line for training and one for validation."""
    names_by_metric: dict[str, list[str]] = {}
    for name in sorted(points):
        names_by_metric.setdefault(STAGE_AND_METRIC.fullmatch(name)[2], []).append(name)  # type: ignore[index]
    metrics = sorted(names_by_metric, key=lambda metric: ("loss" not in metric, metric))
    figure = Figure(figsize=(4.2 * len(metrics), 3.3), layout="constrained")
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0]):
        axes.set(xlabel="epoch", ylabel="accuracy" if metric == "acc" else metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.get_major_formatter().set_useOffset(False)
        axes.grid(alpha=0.4)
        for name in names_by_metric[metric]:
            is_validation = name.startswith("val")
            label, style = (validation_label, "C1.-") if is_validation else ("training", "C0.-")
            axes.plot([*points[name]], [*points[name].values()], style, label=label)
        if best:  # which `fit` tests
            text = f"best: epoch {best['epoch']}"
            axes.axvline(best["epoch"], color="gray", linestyle="--", label=text, zorder=1)
        axes.legend()
    return figure


def save_picture(trainer: Trainer, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory and show it in Weights & Biases."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir, filename)
    with replacing(path) as part:
        figure.savefig(part, dpi=110, bbox_inches="tight")
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])
