"""Searches for a learning rate and the largest batch, which say what they found and end the run."""

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

from lightning_mgpu.callbacks.pictures import save_picture
from lightning_mgpu.runs.directory import run_directory

NO_LIMIT = 2**40  # Lightning would return this size without having tried it
BETA = 0.98  # of Lightning's moving average
FALLS = 0.9  # a loss that never falls below this part of its first value says nothing
SANE = 1.5  # times the first loss; beyond, the loss explodes


class LearningRateSearch(LearningRateFinder):
    """A range test (Smith, 2015): the learning rate grows by batch; `lr_find.png` has the losses.

    Nothing is trained: the weights are put back and the run ends.

    Args:
        min_lr: Of the first batch, the lower one.
        max_lr: Of the last batch.
        num_training_steps: Batches.
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
            save_picture(trainer, draw(rates, losses, lr), "lr_find.png")
            found = "no suggestion, the loss hardly falls: try more num_training_steps, "
            found += "or other weights"
            if lr is not None:
                found = f"{lr:.3g}, where the loss falls fastest: --model.optimizer.lr={lr:.3g}"
            if trainer.is_global_zero:
                print(
                    f"lr_find:  {found}\n          losses: {run_directory(trainer)}/lr_find.png",
                    flush=True,
                )
        raise _TunerExitException  # ends the run in good order, as Lightning's Tuner does


def smoothed(averages: list[float]) -> list[float]:
    """Losses averaged over the steps around each. Lightning's, over 50 before, falls too late."""
    sums = [0.0, *(average * (1 - BETA ** (step + 2)) for step, average in enumerate(averages))]
    losses = [(now - BETA * before) / (1 - BETA) for before, now in pairwise(sums)]
    half = max(1, len(losses) // 40)
    return [mean(losses[max(0, i - half) : i + half + 1]) for i in range(len(losses))]


def suggestion(rates: list[float], losses: list[float]) -> float | None:
    """Where the loss falls fastest on a log axis; `None` if it hardly falls before it explodes."""
    sane = list(takewhile(lambda loss: loss < SANE * losses[0], losses))  # NaN is not less
    if len(sane) < 3 or min(sane) > FALLS * losses[0]:
        return None
    lowest = sane.index(min(sane))
    half = max(1, lowest // 5)  # a slope over fewer steps would be noise's
    slopes = [losses[i + half] - losses[i - half] for i in range(half, lowest - half + 1)] or [0.0]
    return rates[half + slopes.index(min(slopes))]


def draw(rates: list[float], losses: list[float], lr: float | None) -> Figure:
    """Losses by rate, without those that explode: they would squeeze the rest."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log")
    axes.plot(rates, [loss if loss < SANE * losses[0] else math.nan for loss in losses])
    axes.grid(alpha=0.4)
    if lr is not None:
        axes.axvline(lr, color="C1", label=f"{lr:.3g}")
        axes.legend()
    return figure


class BatchSizeSearch(BatchSizeFinder):
    """Doubles the *global* batch until memory ends or `max_trials` sizes fit; then the run ends.

    Args:
        init_val: The first global batch.
        max_trials: Sizes that are tried.
    """

    def __init__(self, init_val: PositiveInt = 256, max_trials: PositiveInt = 6) -> None:
        super().__init__("power", 3, init_val, max_trials, max_val=NO_LIMIT)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # or Lightning's first trial has the batch given
        lightning_setattr(pl_module, "batch_size", self._init_val)
        super().on_fit_start(trainer, pl_module)
        size = self.optimal_batch_size
        if size is not None:  # fast_dev_run has none
            largest = self._init_val * 2 ** (self._max_trials - 1)
            limit = (
                "the largest tried, nothing ran out of memory"
                if size >= largest
                else "twice as many do not fit"
            )
            print(
                f"batch_find: {size} global; {limit}\n          use it with "
                f"--data.batch_size={size}",
                flush=True,
            )
        raise _TunerExitException


def is_search(callbacks: list[Callback]) -> bool:
    """Whether a run searches for a setting, and trains nothing."""
    return any(
        isinstance(callback, (LearningRateSearch, BatchSizeSearch)) for callback in callbacks
    )
