"""Checkpoints: whole files, the best epoch's, which `fit` tests, and the last one's.

`last.ckpt`, from which `--resume` goes on, is saved when the next epoch starts: then all of the
epoch is logged, stepped and validated. After the last epoch it is saved when callbacks and modules
can set no more weights. Nothing of an epoch in progress is kept. Every epoch begins with random
numbers of its own (`seeds.py`), so that there is no state of generators to keep.
"""

import re
import zipfile
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.serialization import get_unsafe_globals_in_checkpoint
from typing_extensions import override

from lightning_mgpu.seeds import VERSION, seed_generators
from lightning_mgpu.tools import UsageError, replacing

LAST = "last.ckpt"
END = "end.ckpt"  # the weights at the end of a run that has stopped within an epoch
KEY = "lightning_mgpu"  # under which `last.ckpt` has what this file adds to Lightning's
SMALLEST = re.compile(r"loss|err|mae|mse|nll|ppl|perplexity|wer|cer")  # names of what is to fall


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values, never code (`weights_only=True`).

    Raises:
        UsageError: If it is not there, damaged in a single bit, or not a Trainer's.
    """
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; a run has its checkpoints in checkpoints/")
    try:
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():  # torch writes checksums, and does not read them
                raise ValueError(f"wrong checksum of {damaged}")
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # whatever the zip reader and the unpickler make of noise
        told = "it is damaged, or it holds objects of classes, whose code is never run"
        raise UsageError(f"{path} cannot be read: {told}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UsageError(f"{path} is not a checkpoint of a Trainer: it has no state_dict")
    return checkpoint


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its name and renames it: a kill leaves the old one, or none."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, **_: Any) -> None:
        torch.save(checkpoint, content := BytesIO())
        content.seek(0)
        if classes := get_unsafe_globals_in_checkpoint(content):  # such as numpy's numbers
            names = ", ".join(sorted(classes))
            raise UsageError(f"{path} could not be read again, as it holds objects of {names}")
        try:
            Path(path).parent.mkdir(exist_ok=True)  # but not the run directory, if it is deleted
            with replacing(Path(path)) as part:
                part.write_bytes(content.getbuffer())
        except OSError as error:
            raise UsageError(f"{path} cannot be saved: {error.strerror}") from error

    @override
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", **_: Any) -> dict[str, Any]:
        return read_checkpoint(path, map_location or "cpu")


class BestCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` in the run directory; `fit` tests its best one.

    Args:
        monitor: The metric to watch. A model that does not log it has no best checkpoint, and
            nobody has one by a validation on the test set.
        mode: Whether the least (`min`) or the largest (`max`) value is the best. Left out: `min`
            for names with loss, err, mae, mse, nll, ppl, perplexity, wer or cer, else `max`.
        save_last: Save `last.ckpt` after every epoch, from which `--resume` goes on.
    """

    def __init__(
        self,
        monitor: str | None = "val_acc",
        mode: Literal["min", "max"] | None = None,
        save_last: bool = True,
        **kwargs: Any,
    ) -> None:
        falls = monitor is not None and SMALLEST.search(monitor)
        super().__init__(
            dirpath=None,  # see setup
            monitor=monitor,
            mode=mode or ("min" if falls else "max"),
            save_last=False,  # Lightning's own is the last *best* one
            enable_version_counter=False,
            **kwargs,
        )
        self.keeps_last = save_last

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))  # whatever the loggers
        super().setup(trainer, pl_module, stage)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.may_choose(trainer):
            super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.may_choose(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def may_choose(self, trainer: Trainer) -> bool:
        """Whether the metric is there and is not one of the test set."""
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        is_there = self.monitor is None or self.monitor in trainer.callback_metrics
        return is_there and not (on_test_set and self.monitor)

    @property
    def best(self) -> tuple[str, dict[str, Any]] | None:
        """The path of the best checkpoint, its epoch (from 1), metric and value; if there is one.

        A kill may have come before its file was renamed.
        """
        if not Path(self.best_model_path).is_file():
            return None
        checkpoint = torch.load(self.best_model_path, "cpu", weights_only=True, mmap=True)
        score = None if self.best_model_score is None else float(self.best_model_score)
        facts = {"epoch": int(checkpoint["epoch"]) + 1, "monitor": self.monitor, "value": score}
        return self.best_model_path, facts

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best so far, also where the run directory has been moved."""
        here, before = str(self.dirpath), state_dict["dirpath"]

        def moved(path: str) -> str:
            return str(Path(here, Path(path).relative_to(before))) if path else ""

        paths = ("best_model_path", "kth_best_model_path", "last_model_path")
        scores = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        state = {**state_dict, **{key: moved(state_dict[key]) for key in paths}}
        super().load_state_dict({**state, "dirpath": here, "best_k_models": scores})


class LastCheckpoint(Callback):
    """Saves `last.ckpt` after every epoch, seeds every epoch, and goes on from a whole epoch.

    Must be the first callback: it saves the finished epoch before any other one changes something
    for the next.

    Args:
        seed: Of the random numbers of a step, such as dropout's.
        saves: Whether `last.ckpt` is saved.
    """

    def __init__(self, seed: int, saves: bool) -> None:
        self.seed, self.saves = seed, saves
        self.first_epoch = 0  # of this process
        self.has_finished = False
        self.loaded: dict[str, Any] = {}
        self.why_stopped = ""  # if the run has stopped by itself, as by EarlyStopping

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_epoch = trainer.current_epoch
        trainer.callback_metrics.update(self.loaded.get("callback_metrics", {}))
        for config in trainer.lr_scheduler_configs:
            by_step, last = config.interval == "step", getattr(config.scheduler, "total_steps", inf)
            num_steps = trainer.estimated_stepping_batches if by_step else trainer.max_epochs
            if last < (num_steps or 0) < inf:
                name = type(config.scheduler).__name__
                raise UsageError(
                    f"--trainer.max_epochs={trainer.max_epochs}: the {name} ends after {last} of "
                    f"{num_steps} steps: start a longer run anew, from --weights if you like"
                )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > self.first_epoch:
            self.save(trainer, LAST)
        seed_generators(self.seed, "step", trainer.current_epoch)
        if (loop := trainer.fit_loop).is_resuming:
            # Lightning would take the old epoch's batches for those of this one. Now it counts them
            # from 0 and calls iter(loader) again, after the seed above.
            loop.epoch_loop.restarting = False
            loop.epoch_loop.reset_restart_stage()
            loop.on_iteration_done()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_finished, self.why_stopped = True, why_stopped(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.has_finished:
            is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self.save(trainer, LAST if is_whole else END)

    def save(self, trainer: Trainer, name: str) -> None:
        if self.saves and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = Path(trainer.default_root_dir, "checkpoints", name)
            trainer.save_checkpoint(path, weights_only=False)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = {
            "streams": VERSION,
            "why_stopped": why_stopped(trainer),
            "callback_metrics": dict(trainer.callback_metrics),  # ReduceLROnPlateau reads old ones
        }

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        self.loaded = checkpoint[KEY]
        if why := self.loaded["why_stopped"]:
            self.why_stopped, trainer.should_stop = why, True
        loop = checkpoint["loops"]["fit_loop"]
        for counts in loop["epoch_progress"].values():
            counts["ready"] = counts["started"]  # the next epoch is one that has not begun
        loop["state_dict"].pop("combined_loader", None)  # the loader begins with its first batch


def why_stopped(trainer: Trainer) -> str:
    """Why a run wants to stop before its end; empty where it does not, or a time limit ends it."""
    timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # type: ignore[attr-defined]
    if not trainer.should_stop or any((each.time_remaining() or 1) <= 0 for each in timers):
        return ""
    stopping = [each for each in trainer.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
    reasons = [each.stopping_reason_message for each in stopping if each.stopping_reason_message]
    return reasons[0] if reasons else "trainer.should_stop was set"
