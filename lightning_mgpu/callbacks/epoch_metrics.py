"""What an epoch has measured, under the usual names: `train_loss`, `train/loss`, `val/mae`, `validation_f1`."""

import re

from lightning.pytorch import Trainer

NAME = re.compile(r"(train|training|val|valid|validation)[/_.](.+)")


def epoch_metrics(trainer: Trainer) -> dict[str, float]:
    """The values of this epoch by name; every process has to call it, as they meet to reduce what was logged.

    Where nothing was validated, Lightning still has values of an epoch before. They are left out. Of a value that is
    logged by step and by epoch, Lightning has `x_step`, `x_epoch` and `x`: `x` is taken.
    """
    every = trainer.check_val_every_n_epoch or 1
    has_validated = (trainer.current_epoch + 1) % every == 0
    metrics = {}
    for name, value in trainer.callback_metrics.items():
        measured = quantity(name)
        is_stale = measured is not None and measured[1] and not has_validated
        if not is_stale and not name.endswith(("_step", "_epoch")):
            metrics[name] = float(value)
    return metrics


def quantity(name: str) -> tuple[str, bool] | None:
    """What a metric of training or validation measures, and whether of validation: `val/mae` -> ('mae', True)."""
    match = NAME.fullmatch(name)
    return (match[2], match[1].startswith("val")) if match else None
