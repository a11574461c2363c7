"""The learning rate in the loggers, in runs of any length."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from typing_extensions import override


class LearningRates(LearningRateMonitor):
    """Lightning's monitor, which also logs at an epoch's first step what a scheduler per step set.

    Without it runs shorter than `log_every_n_steps` have no learning rate in any logger.
    """

    edits_nothing = True

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_epoch_start(trainer, *args, **kwargs)
        is_logged_anyway = trainer._logger_connector.should_update_logs
        rates = {} if is_logged_anyway else self._extract_stats(trainer, "step")
        for logger in trainer.loggers if rates else ():
            logger.log_metrics(rates, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
