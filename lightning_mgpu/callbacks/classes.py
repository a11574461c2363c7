"""What there is to show of a model that tells classes apart: its answers, and what the classes are called."""

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


def logits_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
    """The `logits` (N, C) that a `test_step` returned and the batch's class indices (N,); `None` for other models."""
    if not isinstance(outputs, dict) or not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return None
    logits, y = outputs.get("logits"), batch[1]
    if not isinstance(logits, Tensor) or not isinstance(y, Tensor):
        return None
    fits = logits.ndim == 2 and y.shape == logits.shape[:1] and not y.is_floating_point()
    return (logits, y) if fits else None


def class_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The dataset's; numbers where it has none, or the model has more outputs than there are classes."""
    names = [str(name) for name in getattr(trainer.datamodule, "classes", None) or ()]  # type: ignore[attr-defined]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]
