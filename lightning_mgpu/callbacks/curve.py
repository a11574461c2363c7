"""The book's `Animator` without a notebook: the learning curve, redrawn after every epoch."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure

from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.metrics import STAGE_AND_METRIC, Points, read_points
from lightning_mgpu.tools import errors_as_warnings, replacing


def draw_curve(trainer: Trainer, upload: bool) -> None:
    """Draw `curve.png` from `metrics.csv`; at the end, mark the best epoch and show it in W&B."""
    with errors_as_warnings("curve.png"):
        points = read_points(Path(trainer.default_root_dir)) if trainer.is_global_zero else {}
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        if points:
            ours = (each for each in trainer.callbacks if isinstance(each, BestCheckpoint))  # type: ignore[attr-defined]
            best = next((each.best.get("epoch") for each in ours if upload and each.monitor), None)
            figure = plot_curve(points, "test" if on_test_set else "validation", best)
            save_picture(trainer, figure, "curve.png", upload)


def plot_curve(points: Points, validation_label: str, best_epoch: int | None) -> Figure:
    """One panel per metric, losses first, with a line for training and one for validation."""
    names_by_metric: dict[str, list[str]] = {}
    for name in sorted(points):
        names_by_metric.setdefault(STAGE_AND_METRIC.fullmatch(name)[2], []).append(name)  # type: ignore[index]
    metrics = sorted(names_by_metric, key=lambda metric: ("loss" not in metric, metric))
    figure = Figure(figsize=(4.2 * len(metrics), 3.3), layout="constrained")
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0]):
        axes.set(xlabel="epoch", ylabel="accuracy" if metric == "acc" else metric)
        axes.locator_params("x", integer=True, min_n_ticks=1)
        axes.yaxis.get_major_formatter().set_useOffset(False)
        axes.grid(alpha=0.4)
        for name in names_by_metric[metric]:
            is_validation = name.startswith("val")
            label, style = (validation_label, "C1.-") if is_validation else ("training", "C0.-")
            axes.plot([*points[name]], [*points[name].values()], style, label=label)
        if best_epoch:  # which `fit` tests
            axes.axvline(best_epoch, color="gray", ls="--", label=f"best: epoch {best_epoch}")
        axes.legend()
    return figure


def save_picture(trainer: Trainer, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory and show it in Weights & Biases."""
    if trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
        return
    path = Path(trainer.default_root_dir, filename)
    with replacing(path) as part:
        figure.savefig(part, dpi=110, bbox_inches="tight")
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])
