"""Lightning's searches for a learning rate and for the largest batch, which say what they found and end the run."""

from typing import NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.parsing import lightning_setattr
from matplotlib.figure import Figure
from typing_extensions import override

from lightning_mgpu.callbacks.console import RunHeader, per_device
from lightning_mgpu.runs.devices import devices
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.files import replacing

NO_LIMIT = 2**40  # Lightning would return this size without having tried it
SKIPPED = 10  # of the first losses, which Lightning smooths badly and leaves out of its suggestion, too
FALLS = 0.9  # a loss that never falls below this part of its first value says nothing


class LearningRateSearch(LearningRateFinder):
    """The learning-rate range test (Smith, 2015): the rate grows with every batch; `lr_find.png` has the losses.

    Nothing is trained: the weights are put back and the run ends. Works under every strategy, with one optimizer.

    Args:
        min_lr: Of the first batch.
        max_lr: Of the last batch.
        num_training_steps: Batches.
        early_stop_threshold: Stop where the loss exceeds the lowest by this factor; null: never.
    """

    def __init__(
        self,
        min_lr: float = 1e-4,
        max_lr: float = 10.0,
        num_training_steps: int = 100,
        early_stop_threshold: float | None = 4.0,
    ) -> None:
        if not 0 < min_lr < max_lr:
            raise ValueError(f"min_lr={min_lr}, max_lr={max_lr}: give two positive rates, the lower one first.")
        super().__init__(
            min_lr, max_lr, num_training_steps, early_stop_threshold=early_stop_threshold, update_attr=False
        )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _show_header(trainer, pl_module)
        super().on_fit_start(trainer, pl_module)
        if self.optimal_lr is not None:  # fast_dev_run has none
            self._report(trainer)
        end_run()

    def _report(self, trainer: Trainer) -> None:
        assert self.optimal_lr is not None
        lr, losses = self.optimal_lr.suggestion(), self.optimal_lr.results["loss"]
        if directory := run_directory(trainer):
            figure = Figure(figsize=(5, 3.5), layout="constrained")
            self.optimal_lr.plot(suggest=lr is not None, ax=figure.add_subplot())
            with replacing(directory / "lr_find.png") as part:
                figure.savefig(part, dpi=120, format="png")
        if lr is None:
            raise UsageError(f"no learning rate is suggested after {len(losses)} losses: raise num_training_steps")
        if not trainer.is_global_zero:
            return
        print(f"lr_find:  {lr:.3g}, where the loss falls fastest; all losses: {directory}/lr_find.png")
        first, lowest = losses[SKIPPED], min(losses[SKIPPED:])
        if lowest > FALLS * first:
            print(f"          but it hardly falls ({first:.4g} to {lowest:.4g}): try more num_training_steps")
        print(f"          use it with --model.optimizer.lr={lr:.3g}", flush=True)


class BatchSizeSearch(BatchSizeFinder):
    """Doubles the *global* batch until a step runs out of memory, or `max_trials` sizes have fitted; then the run ends.

    Args:
        init_val: The first global batch.
        max_trials: Sizes that are tried: where nothing runs out, as on most CPUs, the last is init_val * 2^(this - 1).
        steps_per_trial: Steps that a size must survive.

    Raises:
        UsageError: Under strategies with several processes, which Lightning's search cannot drive.
    """

    def __init__(self, init_val: int = 256, max_trials: int = 6, steps_per_trial: int = 3) -> None:
        if min(init_val, max_trials, steps_per_trial) < 1:
            raise ValueError("init_val, max_trials and steps_per_trial must be at least 1.")
        super().__init__("power", steps_per_trial, init_val, max_trials, max_val=NO_LIMIT)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        if trainer.world_size > 1:
            raise UsageError(
                f"the batch-size search runs in one process, not in {trainer.world_size}: search with "
                f"--trainer.devices=1 and multiply by {trainer.world_size}, or with --trainer.strategy=manual_allreduce"
            )
        super().setup(trainer, pl_module, stage)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _show_header(trainer, pl_module)
        lightning_setattr(pl_module, "batch_size", self._init_val)  # or Lightning's first trial has the batch given
        super().on_fit_start(trainer, pl_module)
        size = self.optimal_batch_size
        if size is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            shares = getattr(trainer.strategy, "shares", [1.0] * len(devices(trainer)))
            largest = self._init_val * 2 ** (self._max_trials - 1)
            limit = "the largest tried, nothing ran out of memory" if size >= largest else "twice as many do not fit"
            print(f"batch_find: {size} global, {per_device(size, shares)} per device; {limit}")
            print(f"          use it with --data.batch_size={size}", flush=True)
        end_run()


def is_search(callbacks: list[Callback]) -> bool:
    """Whether a run searches for a setting, and trains nothing."""
    return any(isinstance(callback, (LearningRateSearch, BatchSizeSearch)) for callback in callbacks)


def end_run() -> NoReturn:
    """Leave `Trainer.fit` in good order, as Lightning's Tuner does."""
    raise _TunerExitException


def _show_header(trainer: Trainer, pl_module: LightningModule) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunHeader):  # its turn would come after the search's
            callback.on_fit_start(trainer, pl_module)
