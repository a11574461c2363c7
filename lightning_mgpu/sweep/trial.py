"""What makes a `fit` a trial: it does not look at the test set, it draws no pictures, and it ends early if hopeless."""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.callbacks import ConfusionMatrix, LearningCurve, PredictionGrid
from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.errors import UsageError

JOURNAL = "sweep.journal"  # of Optuna, in the directory of a sweep
STOPPED_EARLY = "stopped early"


class Trial(Callback):
    """Makes a run a trial. In the directory of a sweep, the run reports its epochs to the sweep's study.

    Raises:
        UsageError: If the run would validate on the test set, so that the sweep would tune on it.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(trainer.datamodule, "validates_on_test_set", False):  # type: ignore[attr-defined]
            raise UsageError("a sweep that validates on the test set would tune on it: give --data.val_size=5000")
        pictures = (LearningCurve, PredictionGrid, ConfusionMatrix)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, pictures)]  # type: ignore[attr-defined]
        trainer.limit_test_batches = 0

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_hopeless = self._report(trainer)  # in the first process alone
        trainer.should_stop = trainer.should_stop or trainer.strategy.broadcast(is_hopeless)

    def _report(self, trainer: Trainer) -> bool:
        """Tell Optuna what the epoch has measured; returns whether the pruner gives the trial up."""
        directory = run_directory(trainer)
        if directory is None or not (directory.parent / JOURNAL).exists():
            return False  # W&B's agent has started the run, and needs no Optuna
        from lightning_mgpu.sweep.study import open_trial

        trial, metric = open_trial(directory)
        if (value := epoch_metrics(trainer).get(metric)) is None:
            return False  # nothing was validated
        trial.report(value, trainer.current_epoch + 1)
        if trial.should_prune():
            trial.set_user_attr("note", STOPPED_EARLY)
            return True
        return False
