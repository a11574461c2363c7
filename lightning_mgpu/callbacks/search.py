"""Searches for a learning rate and for the largest batch. They print the result and end the run."""

import math
from itertools import pairwise, takewhile
from statistics import mean

from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.parsing import lightning_setattr
from matplotlib.figure import Figure
from typing_extensions import override

from lightning_mgpu.callbacks.figures import save_picture
from lightning_mgpu.runs.directory import make_run_dir_on_rank_zero

NO_LIMIT = 2**40  # Lightning would return this size without having tried it
BETA = 0.98  # of Lightning's moving average
# relative to the first loss
HARDLY_FALLS = 0.9  # a loss that never gets below this gives no suggestion
EXPLODES = 1.5  # losses from here on are left out


class LearningRateSearch(LearningRateFinder):
    """A range test (Smith, 2015): the learning rate grows by batch; `lr_find.png` has the losses.

    Nothing is trained: the weights are put back and the run ends.

    Args:
        min_lr: Learning rate of the first batch, the smaller one.
        max_lr: Learning rate of the last batch.
        num_training_steps: Number of batches.
    """

    def __init__(
        self,
        min_lr: PositiveFloat = 1e-4,
        max_lr: PositiveFloat = 10.0,
        num_training_steps: PositiveInt = 100,
    ) -> None:
        super().__init__(min_lr, max_lr, num_training_steps, update_attr=False)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self.optimal_lr is not None:  # fast_dev_run has none
            rates, losses = self.optimal_lr.results["lr"], smoothed(self.optimal_lr.results["loss"])
            lr = suggestion(rates, losses)
            save_picture(trainer, plot_losses(rates, losses, lr), "lr_find.png")
            if lr is not None:
                message = f"{lr:.3g}, where the loss falls fastest: --model.optimizer.lr={lr:.3g}"
            else:
                message = "no suggestion, the loss hardly falls: try more num_training_steps, "
                message += "or other weights"
            if trainer.is_global_zero:
                picture = f"{make_run_dir_on_rank_zero(trainer)}/lr_find.png"
                print(f"lr_find:  {message}\n          losses: {picture}", flush=True)
        raise _TunerExitException  # ends the run in good order, as Lightning's Tuner does


def smoothed(averages: list[float]) -> list[float]:
    """Losses averaged over the steps around each. Lightning averages over 50 before: it lags.

    Lightning returns A_t / (1 - b^(t+1)) for steps t = 1, 2, ..., with the moving average
    A_t = b A_(t-1) + (1 - b) loss_t, A_0 = 0. The list counts from 0, so t = i + 1.
    """
    moving_averages = [
        0.0,
        *(average * (1 - BETA ** (i + 2)) for i, average in enumerate(averages)),
    ]
    losses = [(after - BETA * before) / (1 - BETA) for before, after in pairwise(moving_averages)]
    half = max(1, len(losses) // 40)
    return [mean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def suggestion(rates: list[float], losses: list[float]) -> float | None:
    """Where the loss falls fastest on a log axis; `None` if it hardly falls before it explodes."""
    # NaN is not less
    losses = list(takewhile(lambda loss: loss < EXPLODES * losses[0], losses))
    if len(losses) < 3 or min(losses) > HARDLY_FALLS * losses[0]:
        return None
    lowest = losses.index(min(losses))
    half = max(1, lowest // 5)  # over fewer steps, the slope would be noise
    slopes = [losses[i + half] - losses[i - half] for i in range(half, lowest - half + 1)] or [0.0]
    return rates[half + slopes.index(min(slopes))]


def plot_losses(rates: list[float], losses: list[float], lr: float | None) -> Figure:
    """Losses by learning rate, without those that explode: they would squeeze the others."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log")
    axes.plot(rates, [loss if loss < EXPLODES * losses[0] else math.nan for loss in losses])
    axes.grid(alpha=0.4)
    if lr is not None:
        axes.axvline(lr, color="C1", label=f"{lr:.3g}")
        axes.legend()
    return figure


class BatchSizeSearch(BatchSizeFinder):
    """Doubles the *global* batch until memory runs out or `max_trials` sizes fit; ends the run.

    Args:
        init_val: The first global batch size.
        max_trials: How many sizes are tried at most.
    """

    def __init__(self, init_val: PositiveInt = 256, max_trials: PositiveInt = 6) -> None:
        super().__init__("power", 3, init_val, max_trials, max_val=NO_LIMIT)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # otherwise Lightning's first trial has the batch size of the run
        lightning_setattr(pl_module, "batch_size", self._init_val)
        super().on_fit_start(trainer, pl_module)
        size = self.optimal_batch_size
        if size is not None:  # fast_dev_run has none
            limit = "twice as many do not fit"
            if size >= self._init_val * 2 ** (self._max_trials - 1):
                limit = "the largest tried, nothing ran out of memory"
            print(f"batch_find: {size} global; {limit}", flush=True)
            print(f"          use it with --data.batch_size={size}", flush=True)
        raise _TunerExitException


def is_search(callbacks: list[Callback]) -> bool:
    """Whether a run searches for a setting, and trains nothing."""
    searches = (LearningRateSearch, BatchSizeSearch)
    return any(isinstance(callback, searches) for callback in callbacks)
