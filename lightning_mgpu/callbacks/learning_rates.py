"""The learning rate in the loggers, in runs of any length."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from typing_extensions import override


class LearningRates(LearningRateMonitor):
    """Lightning's monitor, which also logs at an epoch's first step what a scheduler per step set.

    Otherwise, runs shorter than `log_every_n_steps` would have no learning rate in any logger.
    """

    edits_nothing = True  # see strategies/hooks.py

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_epoch_start(trainer, *args, **kwargs)
        if self.logging_interval == "epoch" or trainer._logger_connector.should_update_logs:
            return  # logged anyway
        interval = "any" if self.logging_interval == "step" else "step"
        rates = self._extract_stats(trainer, interval)
        for logger in trainer.loggers if rates else ():
            logger.log_metrics(rates, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
