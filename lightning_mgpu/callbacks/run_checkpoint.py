"""Checkpoints a run can be resumed from at any moment, beside Lightning's checkpoints of the best epochs.

    --checkpoint.last_every_n_minutes=1      # last.ckpt, besides after every epoch; 0: after every batch
    --checkpoint.save_top_k=3                # and whatever else Lightning's ModelCheckpoint takes

`last.ckpt` is saved between batches, when a batch's metrics are logged and its validation is over: Lightning's hooks
lie in the middle of that. Ctrl-C and SIGTERM save it and stop there, as does the signal SLURM sends before the time is
up; a second one stops at once.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_mgpu.callbacks import unsaved_state
from lightning_mgpu.callbacks.run_directory import is_run_dir
from lightning_mgpu.checkpoint_io import KEY, LAST, PREVIOUS, AtomicCheckpointIO, keep_previous
from lightning_mgpu.errors import UsageError

SECONDS_BETWEEN_QUESTIONS = 1.0  # processes ask the first one what to do: a broadcast, and on a GPU a wait


class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` with a `last.ckpt` to resume from.

    Args:
        save_last: Keep `last.ckpt` and, should it be damaged, the `previous.ckpt`; both in a local `dirpath`.
        last_every_n_minutes: How often `last.ckpt` is saved within an epoch; it is saved after every epoch in any case.
    """

    def __init__(self, *args: Any, save_last: bool = True, last_every_n_minutes: float = 5.0, **kwargs: Any) -> None:
        super().__init__(*args, save_last=False, **kwargs)  # type: ignore[misc]
        if last_every_n_minutes < 0:
            raise ValueError(f"checkpoint.last_every_n_minutes={last_every_n_minutes}: give minutes; 0 is every batch.")
        self.keep_last = save_last
        self.last_every_n_minutes = last_every_n_minutes
        self.config: dict[str, Any] = {}  # model, data and seed on the command line, for whoever has the file alone
        self.scaled_by = 1  # what `--scale_by_devices` has multiplied of it
        self.requeue_signal: signal.Signals | None = None  # SLURM's, which says that the time is up
        self._signal: signal.Signals | None = None
        self._saving_last = False
        self._epoch_is_over = False
        self._resumed: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._handlers: dict[signal.Signals, Any] = {}

    @property
    def time_is_up(self) -> bool:
        """Whether SLURM stopped the run, in the first process."""
        return self._signal is not None and self._signal == self.requeue_signal

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if self.dirpath is None and is_run_dir(trainer.default_root_dir):
            self.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")  # whatever the logger
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.keep_last and not is_local(str(self.dirpath)):
            raise UsageError(
                f"checkpoint.dirpath={self.dirpath}: last.ckpt, to resume a run from, is kept on local disks only: "
                "take a local directory, or keep the best checkpoints there alone with --checkpoint.save_last=false"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._resumed:
            self._pending = unsaved_state.restore(trainer, pl_module, self._resumed)
            if self._resumed["epoch_is_over"]:
                trainer.fit_loop.restarting = False  # the next epoch is one like all others
                trainer.fit_loop.epoch_loop.reset_restart_stage()
            self._resumed = {}
        self._saved_at = self._asked_at = time.monotonic()
        self._num_batches, self._asked_for, self._ask_at = 0, 0, 1
        self._signal = None  # it stopped the fit before this one
        if self.keep_last and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._listen(trainer)
            self._call_after(trainer.fit_loop.epoch_loop, lambda fetcher: self._after_batch(trainer, fetcher))
            self._call_after(trainer.fit_loop, lambda: self._after_epoch(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._restore_handlers()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # Lightning ignores further ones while it ends
            self._restore_handlers()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = {"config": self.config, "scaled_by": self.scaled_by}
        if self._saving_last:
            checkpoint[KEY] |= {"epoch_is_over": self._epoch_is_over, **unsaved_state.collect(trainer, pl_module)}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        try:
            loop, _ = checkpoint["loops"]["fit_loop"], checkpoint["optimizer_states"]
            is_over = loop["epoch_loop.batch_progress"]["is_last_batch"]
        except (KeyError, TypeError) as error:
            raise UsageError(
                "the checkpoint holds weights only, or does not say how far its run was: no run can go on from it"
            ) from error
        if is_over:
            loop["state_dict"].pop("combined_loader", None)  # `limit_train_batches` may have ended the epoch
        if "processes" in checkpoint.get(KEY, {}):
            self._resumed = checkpoint[KEY]
            unsaved_state.truncate_log(trainer, self._resumed["rows"])

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of a run directory that was moved, the files are where it is now; another run's best is none of this one's.

        Lightning would take over its `best_model_path`, to be tested as this run's.
        """
        here = Path(str(self.dirpath))
        if state_dict["last_model_path"] and any((here / name).is_file() for name in (LAST, PREVIOUS)):
            moved = {key: str(here / Path(state_dict[key]).name) if state_dict[key] else "" for key in PATHS}
            best = {str(here / Path(path).name): score for path, score in state_dict["best_k_models"].items()}
            state_dict = {**state_dict, **moved, "best_k_models": best, "dirpath": self.dirpath}
        if state_dict.get("dirpath") == self.dirpath:
            super().load_state_dict(state_dict)

    # Between batches and between epochs

    def _after_batch(self, trainer: Trainer, data_fetcher: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        if self._pending:
            unsaved_state.add_logged(trainer, self._pending)
        self._num_batches += 1
        if loop._num_ready_batches_reached():
            return  # the epoch's end follows
        cut_short = loop.done  # max_steps, max_time, or a callback that stops training
        if not cut_short and (loop._should_accumulate() or loop._should_check_val_fx(data_fetcher)):
            return  # gradients are not saved; Lightning would miscount after a validation
        if cut_short or self._num_batches >= self._ask_at:
            is_due = time.monotonic() - self._saved_at >= 60 * self.last_every_n_minutes
            self._act(trainer, "save" if cut_short or is_due else "", epoch_is_over=False)

    def _after_epoch(self, trainer: Trainer) -> None:
        self._pending = {}
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():  # else the last batch has saved
            self._act(trainer, "save", epoch_is_over=True)

    def _act(self, trainer: Trainer, wish: str, epoch_is_over: bool) -> None:
        """Save or stop, as the first process says; it also says after how many batches the next question is due."""
        now, interval = time.monotonic(), 1
        if trainer.world_size > 1 and self.last_every_n_minutes > 0:
            num_batches, seconds = self._num_batches - self._asked_for, now - self._asked_at
            interval = max(1, min(2 * num_batches, int(SECONDS_BETWEEN_QUESTIONS * num_batches / max(seconds, 1e-6))))
        wish, interval, signum = trainer.strategy.broadcast((wish, interval, self._signal))
        self._asked_at, self._asked_for, self._ask_at = now, self._num_batches, self._num_batches + interval
        if wish or signum is not None:
            self._save_last(trainer, epoch_is_over)
        if signum is not None:
            raise KeyboardInterrupt

    def _save_last(self, trainer: Trainer, epoch_is_over: bool) -> None:
        path = Path(str(self.dirpath)) / LAST
        if trainer.is_global_zero:  # type: ignore[attr-defined]
            keep_previous(path)
        self.last_model_path = str(path)
        self._saving_last, self._epoch_is_over = True, epoch_is_over
        try:
            trainer.save_checkpoint(path, self.save_weights_only)
        finally:
            self._saving_last = False
        self._saved_at = time.monotonic()

    @staticmethod
    def _call_after(loop: Any, function: Any) -> None:
        """Lightning has no hook that comes after a batch's, or an epoch's, last log."""
        theirs = type(loop).on_advance_end

        def on_advance_end(*args: Any) -> None:
            theirs(loop, *args)
            function(*args)

        loop.on_advance_end = on_advance_end

    # Signals

    def _listen(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._restore_handlers()  # of a fit that was stopped, which Lightning leaves deaf to Ctrl-C
        environment = trainer.strategy.cluster_environment if hasattr(trainer.strategy, "cluster_environment") else None
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self.requeue_signal = signal.Signals(environment.requeue_signal)  # SIGTERM, too, goes to every job requeued
        for signum in (signal.SIGINT, self.requeue_signal or signal.SIGTERM):
            if trainer.is_global_zero:  # type: ignore[attr-defined]
                self._handlers[signum] = signal.signal(signum, self._on_signal)
            else:
                self._handlers[signum] = signal.signal(signum, signal.SIG_IGN)  # the first process tells the others

    def _on_signal(self, signum: int, frame: Any) -> None:
        if self._signal is not None:  # the second one
            self._restore_handlers()
            raise KeyboardInterrupt
        self._signal = signal.Signals(signum)
        # not through print, which may be what was interrupted
        os.write(2, f"\n{self._signal.name}: stopping after this batch; once more stops at once.\n".encode())

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())


PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
