"""What makes a `fit` a trial: it does not look at the test set, it draws no pictures, and it ends early if hopeless.

W&B's agent starts trials, too, and needs no Optuna. So only the functions at the end import Optuna.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.callbacks import ConfusionMatrix, LearningCurve, PredictionGrid
from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.errors import UsageError

if TYPE_CHECKING:
    import optuna

JOURNAL = "sweep.journal"  # of Optuna, in the directory of a sweep
TRIAL_DIR = "trial_"  # and the number of a trial, in three digits
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
        metrics = epoch_metrics(trainer)  # in all processes, which meet to reduce them; the first one reports
        is_hopeless = trainer.strategy.broadcast(self._report(trainer, metrics))
        trainer.should_stop = trainer.should_stop or is_hopeless

    def _report(self, trainer: Trainer, metrics: dict[str, float]) -> bool:
        """Tell Optuna what the epoch has measured; returns whether the pruner gives the trial up."""
        directory = run_directory(trainer)
        if directory is None or not (directory.parent / JOURNAL).exists():
            return False  # W&B's agent has started the run
        trial, metric = open_trial(directory)
        if (value := metrics.get(metric)) is None:
            return False  # nothing was validated
        trial.report(value, trainer.current_epoch + 1)
        if trial.should_prune():
            trial.set_user_attr("note", STOPPED_EARLY)
            return True
        return False


def open_study(sweep_dir: Path, direction: Literal["minimize", "maximize"] | None = None) -> "optuna.Study":
    """The study of a sweep, which several processes may have open; with a direction, a new one where there is none."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep_dir / JOURNAL)))
    if direction is None:
        return optuna.load_study(study_name="sweep", storage=storage)
    return optuna.create_study(study_name="sweep", storage=storage, direction=direction, load_if_exists=True)


def open_trial(run_dir: Path) -> tuple["optuna.Trial", str]:
    """The trial of a run, by the run's directory, and the name of the metric."""
    import optuna

    study = open_study(run_dir.parent)
    settings = study.user_attrs["settings"]
    if options := settings["early_terminate"]:
        # W&B's Hyperband compares a run at epochs min_iter * eta^k with those before it: successive halving
        eta = options.get("eta", 3)
        first = options.get("min_iter") or options.get("max_iter", 1) // eta ** options.get("s", 0)
        study.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=max(1, first), reduction_factor=eta)
    else:
        study.pruner = optuna.pruners.NopPruner()
    number = int(run_dir.name.removeprefix(TRIAL_DIR))
    return optuna.trial.Trial(study, study.get_trials()[number]._trial_id), settings["metric"]
