"""The output of a training run: one line per epoch, and on a terminal a progress bar below."""

import sys
from typing import Any

from jsonargparse.typing import NonNegativeInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics, metrics_so_far, split_metric_name


class EpochLines(RichProgressBar):
    """One line per epoch and Lightning's progress bar, with metrics logged with `prog_bar=True`.

    Args:
        refresh_rate: How often per second the progress bar is drawn; 0 leaves it out. The default
            is 1 on a terminal, and 0 where the output goes to a file.
        leave: Keep the progress bars of earlier epochs on the screen.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self, refresh_rate: NonNegativeInt | None = None, leave: bool = False) -> None:
        super().__init__(int(sys.stdout.isatty()) if refresh_rate is None else refresh_rate, leave)
        self._metrics_before: dict[str, Tensor] = {}  # logged before the epoch
        self._finished_epoch = ""  # `epoch 3/10` until its line is printed

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_line(trainer)
        super().on_train_epoch_start(trainer, pl_module)
        self._metrics_before = metrics_so_far(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All processes reduce what was logged. The bar would do so in the first one only, and hang
        # if the module, which is called next, communicates as well.
        _ = trainer.callback_metrics
        super().on_train_epoch_end(trainer, pl_module)
        self._finished_epoch = epoch_number(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_line(trainer)

    def _print_line(self, trainer: Trainer) -> None:
        if self._finished_epoch and self._enabled:  # in the first process only
            values = epoch_values(trainer, self._metrics_before)
            print("  ".join([self._finished_epoch, *values]), flush=True)  # rich: above the bar
        self._finished_epoch = ""

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        # Lightning's would add the loggers' version number. `loss` stays a tensor, which only
        # drawing waits for: Lightning reads values with `prog_bar=True` from the device every step.
        loss = {name: value for name, value in trainer.logged_metrics.items() if name == "loss"}
        return {**loss, **trainer.progress_bar_metrics}

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning counts from 0
        return f"{epoch_number(self.trainer):{len(self.validation_description)}}"


def epoch_number(trainer: Trainer) -> str:
    """`epoch 3/10`; `epoch 3` where steps or time end the run."""
    total = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    return f"epoch {trainer.current_epoch + 1}{total}"


def epoch_values(trainer: Trainer, metrics_before: dict[str, Tensor]) -> list[str]:
    """['val_loss 0.5012', 'train_loss 0.4823', '10.5 s'] of the epoch that is over.

    Metrics of training and validation are shown, and those with `prog_bar=True`. If there are none
    of these, all are shown.
    """
    metrics = epoch_metrics(trainer, metrics_before)
    seconds = [f"{metrics.pop('epoch_seconds'):.1f} s"] if "epoch_seconds" in metrics else []
    in_bar = trainer._logger_connector._progress_bar_metrics  # so far, too
    shown = [
        name
        for name in metrics
        if split_metric_name(name) or name in in_bar or f"{name}_epoch" in in_bar
    ]
    return [f"{name} {metrics[name]:.4f}" for name in shown or metrics] + seconds
