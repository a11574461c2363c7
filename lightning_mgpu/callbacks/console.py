"""What a run prints while it trains: one line an epoch. A terminal has a progress bar below."""

import re
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor
from typing_extensions import override

# `train/loss`, `validation_f1`
NAME = re.compile(r"(train|training|val|valid|validation)[/_.](.+)")
# what Lightning adds to the name of a value logged by step and by epoch
FORKED = re.compile(r"_(step|epoch)(?=$|/dataloader_idx_)")


class EpochLines(RichProgressBar):
    """One line an epoch; on a terminal also Lightning's bar, with the `loss` last logged alone."""

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self) -> None:
        super().__init__(refresh_rate=int(sys.stdout.isatty()))  # 0: no bar
        self._before: dict[str, Tensor] = {}  # the epoch

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._before = metrics_so_far(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        line = epoch_line(
            trainer, self._before
        )  # in all processes, which meet to reduce the metrics
        if self._enabled:  # not in other processes than the first
            print(line, flush=True)  # rich puts it above the bar

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {name: value for name, value in trainer.logged_metrics.items() if name == "loss"}

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning counts from 0
        return f"{epoch_number(self.trainer):{len(self.validation_description)}}"


def epoch_number(trainer: Trainer) -> str:
    """`epoch 3/10`; `epoch 3` where steps or time end the run."""
    return f"epoch {trainer.current_epoch + 1}" + (
        f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    )


def epoch_line(trainer: Trainer, before: dict[str, Tensor]) -> str:
    """`epoch 3/10  val_loss 0.5012  train_loss 0.4823  10.5 s`.

    Shown are the metrics of training and validation, and those with `prog_bar=True`; else all.
    """
    metrics = epoch_metrics(trainer, before)
    seconds = [f"{metrics.pop('epoch_seconds'):.1f} s"] if "epoch_seconds" in metrics else []
    asked = [name for name in metrics if quantity(name) or name in trainer.progress_bar_metrics]
    return "  ".join(
        [
            epoch_number(trainer),
            *(f"{name} {metrics[name]:.4f}" for name in asked or metrics),
            *seconds,
        ]
    )


def metrics_so_far(trainer: Trainer) -> dict[str, Tensor]:
    """The values logged in epochs before, when an epoch starts."""
    return dict(trainer._logger_connector._callback_metrics)


def epoch_metrics(trainer: Trainer, before: dict[str, Tensor]) -> dict[str, float]:
    """The values of this epoch by name; every process calls it, to meet and reduce what was logged.

    Lightning keeps values of epochs `before`, such as those of the last validation. A value that
    was logged anew is another tensor. Of a value logged by step and by epoch, Lightning has
    `x_step`, `x_epoch` and `x`: `x` is taken.
    """
    found = {
        name: value
        for name, value in trainer.callback_metrics.items()
        if value is not before.get(name)
    }
    is_twice = {
        name for name in found if (short := FORKED.sub("", name)) != name and short in found
    }
    return {name: float(value) for name, value in found.items() if name not in is_twice}


def quantity(name: str) -> tuple[str, bool] | None:
    """What a metric measures, and whether of validation: `val/mae` -> ('mae', True)."""
    match = NAME.fullmatch(name)
    return (match[2], match[1].startswith("val")) if match else None
