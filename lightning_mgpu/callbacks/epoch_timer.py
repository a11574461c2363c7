"""Seconds of training per epoch, as by the book's `Timer`: devices synchronised, no evaluation."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.devices import process_devices, synchronize


class EpochTimer(Callback):
    """Logs `epoch_seconds` (s, of training only) after every epoch."""

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self) -> None:
        self.seconds: list[float] = []  # one per epoch
        self._elapsed = 0.0  # in this epoch
        self._started: float | None = None  # `None` while validation runs

    @property
    def seconds_per_epoch(self) -> float:
        """The mean over the epochs this process has trained; NaN before the first."""
        return sum(self.seconds) / len(self.seconds) if self.seconds else float("nan")

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._elapsed = 0.0
        self._start(trainer)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._started is None:  # the first batch after a validation in the middle of the epoch
            self._start(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)
        self.seconds.append(self._elapsed)
        pl_module.log("epoch_seconds", self._elapsed, sync_dist=True)  # the mean over processes

    def _start(self, trainer: Trainer) -> None:
        synchronize(process_devices(trainer))
        self._started = time.perf_counter()

    def _stop(self, trainer: Trainer) -> None:
        if self._started is not None:
            synchronize(process_devices(trainer))
            self._elapsed += time.perf_counter() - self._started
            self._started = None
