"""What an epoch has measured, under any names a model logs it: `train_loss`, `train/loss`, `val/mae`, `valid_f1`."""

import re

from lightning.pytorch import Trainer

TRAINING, VALIDATION = r"train(ing)?(?![a-z])[/_. ]?", r"val(id(ation)?)?(?![a-z])[/_. ]?"


def epoch_metrics(trainer: Trainer) -> dict[str, float]:
    """The values of this epoch by name; every process has to call it, as they meet to reduce what was logged.

    Where nothing was validated, Lightning still has values of an epoch before. They are left out.
    """
    every = trainer.check_val_every_n_epoch
    is_stale = VALIDATION if every and (trainer.current_epoch + 1) % every else r"(?!)"
    metrics = {n: float(x) for n, x in trainer.callback_metrics.items() if x.numel() == 1 and not re.match(is_stale, n)}
    # of a value that is logged by step and by epoch, Lightning has `x_step`, `x_epoch` and `x`
    twice = {f"{name}{suffix}" for name in metrics for suffix in ("_step", "_epoch")}
    return {name: value for name, value in metrics.items() if name not in twice}


def quantity(name: str) -> tuple[str, bool] | None:
    """What a metric of training or validation measures, and whether of validation: `val/mae` -> ('mae', True)."""
    for pattern, of_validation in ((TRAINING, False), (VALIDATION, True)):
        if (match := re.match(pattern, name)) and name[match.end() :]:
            return name[match.end() :], of_validation
    return None
