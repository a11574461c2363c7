"""What pictures share: where they are written, and what they need to know of a model that tells classes apart."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing


def save_picture(trainer: Trainer, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory, in the format of its suffix, and show it in Weights & Biases."""
    if (directory := run_directory(trainer)) is None:
        return
    path = directory / filename
    with replacing(path) as part:
        figure.savefig(part, dpi=110)
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])


def logits_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
    """The `logits` (N, C) that a `test_step` returned and the batch's class indices (N,); `None` for other models."""
    if not isinstance(outputs, dict) or not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return None
    logits, y = outputs.get("logits"), batch[1]
    if not isinstance(logits, Tensor) or not isinstance(y, Tensor):
        return None
    fits = logits.ndim == 2 and y.shape == logits.shape[:1] and not y.is_floating_point()
    return (logits.detach(), y) if fits else None


def class_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The dataset's; numbers where it has none, or the model has more outputs than there are classes."""
    names = [str(name) for name in getattr(trainer.datamodule, "classes", None) or ()]  # type: ignore[attr-defined]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]
