"""The learning curve, redrawn after every epoch: the book's `Animator`."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure

from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.metrics import STAGE_AND_METRIC, Points, read_points
from lightning_mgpu.tools import atomic_write, errors_as_warnings


def draw_curve(trainer: Any, upload: bool) -> None:
    """Draw `curve.png` from `metrics.csv`; at the end, mark the best epoch and upload to W&B."""
    if not trainer.is_global_zero:
        return
    with errors_as_warnings("curve.png"):
        if points := read_points(Path(trainer.default_root_dir)):
            on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)
            ours = [x for x in trainer.callbacks if isinstance(x, BestCheckpoint)]
            best = ours[0].best if upload and ours and ours[0].monitor else {}
            val_label = "test" if on_test_set else "validation"
            save_picture(trainer, plot_curve(points, val_label, best), "curve.png", upload)


def plot_curve(points: Points, val_label: str, best: dict[str, Any]) -> Figure:
    """One panel per metric, losses first, with a training and a validation line."""
    names_by_metric: dict[str, list[str]] = {}
    for name in sorted(points):
        names_by_metric.setdefault(STAGE_AND_METRIC.sub(r"\2", name), []).append(name)
    metrics = sorted(names_by_metric, key=lambda metric: ("loss" not in metric, metric))
    figure = Figure(figsize=(4.2 * len(metrics), 3.3), layout="constrained")
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0]):
        axes.set(xlabel="epoch", ylabel="accuracy" if metric == "acc" else metric)
        axes.locator_params("x", integer=True, min_n_ticks=1)
        axes.yaxis.get_major_formatter().set_useOffset(False)
        axes.grid(alpha=0.4)
        for name in names_by_metric[metric]:
            is_validation = name.startswith("val")
            label, style = (val_label, "C1.-") if is_validation else ("training", "C0.-")
            axes.plot([*points[name]], [*points[name].values()], style, label=label)
        if best:  # the epoch that `fit` tests
            axes.axvline(best["epoch"], color="gray", ls="--", label=f"best: epoch {best['epoch']}")
        axes.legend()
    return figure


def save_picture(trainer: Any, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory and upload it to Weights & Biases."""
    if trainer.fast_dev_run or not trainer.is_global_zero:
        return
    path = Path(trainer.default_root_dir, filename)
    with atomic_write(path) as part:
        figure.savefig(part, dpi=110, bbox_inches="tight")
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])
