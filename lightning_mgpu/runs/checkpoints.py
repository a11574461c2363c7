"""Checkpoints: whole files, the best epoch's, which `fit` tests, and the last one's.

`--resume` goes on from `last.ckpt`, which is saved when the next epoch starts: all of the epoch is
logged, stepped and validated then. Every epoch has random numbers of its own (`seeds.py`).
"""

import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils._pytree import tree_map_only

from lightning_mgpu.seeds import VERSION, seed_generators
from lightning_mgpu.tools import EXCHANGE, LAST, UsageError, atomic_write, printable

END = "end.ckpt"  # the weights at the end of a run that has stopped within an epoch
KEY = "lightning_mgpu"  # under which a checkpoint has what `LastCheckpoint` adds to Lightning's
IS_KNOWN = re.compile("(loss|(?<![a-z])acc(uracy)?)$")  # whether such a metric falls or rises
PREFIX = re.compile(r"(module\.|model\.|net\.|_orig_mod\.)*")  # of the names of weights


def read_checkpoint(path: str | Path, bare: bool = False) -> dict[str, Any]:
    """Read a Trainer's checkpoint, or a `bare` state_dict: tensors and plain values, never code."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; a run has its checkpoints in checkpoints/")
    try:
        # torch writes checksums, but does not read them; its files before 1.6 are not zip files
        damaged = zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip()
        checkpoint = {} if damaged else dict(torch.load(path, "cpu", weights_only=True))
    except Exception:  # whatever the zip reader and the unpickler make of noise
        checkpoint = {}
    if bare and checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return {"state_dict": checkpoint}
    if "state_dict" not in checkpoint:
        why = "it is damaged, or no Trainer's, or holds objects of classes, whose code never runs"
        raise UsageError(f"{path} cannot be read: {why}")
    return checkpoint


def load_weights(module: LightningModule, path: str) -> list[str]:
    """Load a file's weights, whose names may have another prefix; returns names left out.

    Those are in the file or in the module only, or of two shapes, and `strict_loading` is False.
    """
    own, given = module.state_dict(), read_checkpoint(path, bare=True)["state_dict"]
    missing = {PREFIX.sub("", name): name for name in own if name not in given}
    given = {n if n in own else missing.get(PREFIX.sub("", n), n): given[n] for n in given}
    strict = module.strict_loading  # it raises for what does not fit
    fits = [n for n in given if strict or (n in own and given[n].shape == own[n].shape)]
    if not fits:
        raise UsageError(f"{path} has nothing of the model's: {[*given][:3]}, not {[*own][:3]}")
    module.load_state_dict({name: given[name] for name in fits}, strict=strict)
    return [name for name in own | given if name not in fits]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its name and renames it: a kill leaves the old one, or none."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        plain = tree_map_only(
            (np.float64, np.integer, np.bool_),  # not np.float32: as a float it has other digits
            lambda number: number.item(),
            checkpoint,
            is_leaf=lambda part: hasattr(part, "_metadata"),  # a state_dict, whose copy has none
        )
        torch.save(plain, content := BytesIO())
        content.seek(0)
        if classes := get_unsafe_globals_in_checkpoint(content):  # such as NumPy arrays
            raise UsageError(f"{path} could not be read again: it holds objects of {classes}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path)) as part:
            part.write_bytes(content.getbuffer())

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(path)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` in the run directory; `fit` tests its best one.

    Args:
        monitor: The metric to watch, if it is logged, and not of the test set.
        mode: Left out: `min` for a loss, and `max` for an accuracy. Other metrics need it.

    Raises:
        ValueError: If a metric needs a mode, or would have the value of an earlier validation.
    """

    def __init__(
        self,
        monitor: str | None = "val_acc",
        mode: Literal["min", "max"] | None = None,
        **kwargs: Any,
    ) -> None:
        if monitor and mode is None and not IS_KNOWN.search(monitor):
            raise ValueError(f"--checkpoint.monitor={monitor}: add --checkpoint.mode=min, or max")
        by_steps = kwargs.get("every_n_train_steps") or kwargs.get("train_time_interval")
        if by_steps and (monitor or "").startswith("val"):
            reason = "would have the value of an earlier one: add --checkpoint.monitor=null"
            why = f"--checkpoint.monitor={monitor}: checkpoints between validations"
            raise ValueError(f"{why} {reason}")
        super().__init__(
            dirpath=None,  # `RunRecord` sets it
            monitor=monitor,
            mode=mode or ("min" if "loss" in (monitor or "") else "max"),
            save_last=False,  # Lightning's own is the last *best* one
            enable_version_counter=False,
            **kwargs,
        )
        self.has_validated = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.monitor and getattr(trainer.datamodule, "validates_on_test_set", False):  # type: ignore[attr-defined]
            self.save_top_k = 0  # the test set must not choose
        super().setup(trainer, pl_module, stage)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_validated = not trainer.sanity_checking
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
        elif self.has_validated:
            rank_zero_warn(self.describe_unlogged(trainer))

    def describe_unlogged(self, trainer: Trainer) -> str:
        logged = ", ".join(trainer.callback_metrics) or "nothing"
        return f"--checkpoint.monitor={self.monitor} was not logged; logged were: {logged}"

    @property
    def best(self) -> dict[str, Any]:
        """Epoch (from 1), metric, value and path of the best checkpoint; empty if there is none."""
        path = Path(self.best_model_path)  # of another directory, where a run was copied or moved
        if not path.is_file() or not path.is_relative_to(str(self.dirpath)):
            return {}
        epoch = read_checkpoint(path)["epoch"] + 1
        value = float(self.best_model_score) if self.best_model_score is not None else None
        return {"epoch": epoch, "monitor": self.monitor, "value": value, "path": str(path)}


class LastCheckpoint(Callback):
    """Saves `last.ckpt` after every epoch, seeds every epoch, and goes on from a whole epoch.

    It is the first callback, to save the epoch before another changes something for the next.
    """

    def __init__(self, seed: int, saves: bool, weights: str | None = None) -> None:
        self.seed, self.saves, self.weights = seed, saves, weights
        self.is_saving = self.has_finished = False
        self.first_epoch = 0  # of this process
        self.loaded_metrics: dict[str, Any] = {}
        self.num_optimizers: int | None = None  # in the checkpoint to go on from
        self.frozen: list[str] | None = None  # parameters, in that checkpoint
        self.modes: dict[str, dict[str, bool]] = {}  # of the modules when an epoch begins
        self.why_stopped = ""  # if the run has stopped by itself, as by EarlyStopping

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.weights:
            if (left_out := load_weights(pl_module, self.weights)) and trainer.is_global_zero:
                print(f"{self.weights}: left out are {printable(', '.join(left_out))}")
            self.weights = None  # `fit` ends with a test of other ones

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has, num = bool(trainer.ckpt_path), len(trainer.optimizers)
        if trainer.strategy.broadcast(has) != has:
            raise UsageError("only some machines have the run's last.ckpt: they must share a disk")
        if self.num_optimizers not in (None, num):  # Lightning would restore what there is
            reason = f"has the states of {self.num_optimizers} optimizers, and the model {num}"
            raise UsageError(f"{trainer.ckpt_path} {reason}: start a new run by --weights")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_epoch = trainer.current_epoch
        trainer.callback_metrics.update(self.loaded_metrics)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > self.first_epoch:
            self.modes = read_modes(pl_module)
            self.save(trainer, LAST)
        elif self.frozen is not None:  # after all hooks that freeze layers when a run begins
            for name, p in pl_module.named_parameters():  # BackboneFinetuning forgets it
                p.requires_grad_(name not in self.frozen)
            for name, module in pl_module.named_modules():
                vars(module).update(self.modes.get(name, {}))
        seed_generators(self.seed, "step", trainer.current_epoch)
        if (loop := trainer.fit_loop).is_resuming:
            # Lightning would take the old epoch's batches for those of this one. Now it counts them
            # from 0 and calls iter(loader) again, after the seed above.
            loop.epoch_loop.restarting = False
            loop.on_iteration_done()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_finished, self.why_stopped = True, why_stopped(trainer)
        self.modes = read_modes(pl_module)  # before another callback's `eval()` at the end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.has_finished:
            is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self.save(trainer, LAST if is_whole else END)
            if is_whole and self.saves:  # the resumed run may have left one
                Path(trainer.default_root_dir, "checkpoints", END).unlink(missing_ok=True)

    def save(self, trainer: Trainer, name: str) -> None:
        if self.saves and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = Path(trainer.default_root_dir, "checkpoints", name)
            self.is_saving = True
            trainer.save_checkpoint(path, weights_only=False)
            self.is_saving = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.is_saving:
            metrics = dict(trainer.callback_metrics)  # ReduceLROnPlateau may read old ones
            frozen = [name for name, p in pl_module.named_parameters() if not p.requires_grad]
            checkpoint[KEY] = {"streams": VERSION, "metrics": metrics, "frozen": frozen}
            checkpoint[KEY] |= {"modes_by_name": self.modes, "why_stopped": why_stopped(trainer)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            checkpoint["callbacks"] = {}  # an evaluation takes the weights alone
            checkpoint["current_model_state"] = checkpoint["state_dict"]  # WeightAveraging's
            return
        if KEY not in checkpoint and trainer.optimizers:
            return  # a callback puts back what it has saved itself, as LearningRateFinder does
        loop = checkpoint["loops"]["fit_loop"]
        is_whole = loop["epoch_loop.batch_progress"]["is_last_batch"]
        if KEY not in checkpoint or not is_whole:  # as Lightning's under SLURM
            raise UsageError(f"{trainer.ckpt_path} was saved within an epoch: move it away")
        if EXCHANGE in checkpoint and not hasattr(trainer.strategy, "exchange"):
            raise UsageError(f"{trainer.ckpt_path} has the state of an exchange: keep its strategy")
        self.loaded_metrics, self.frozen = checkpoint[KEY]["metrics"], checkpoint[KEY]["frozen"]
        self.num_optimizers = len(checkpoint["optimizer_states"])
        self.modes = checkpoint[KEY].get("modes_by_name", {})  # older files have none
        if why := checkpoint[KEY]["why_stopped"]:
            self.why_stopped, trainer.should_stop = why, True
        for counts in loop["epoch_progress"].values():
            counts["ready"] = counts["started"]  # the next epoch is one that has not begun
        loop["state_dict"].pop("combined_loader", None)  # the loader begins with its first batch


def read_modes(model: LightningModule) -> dict[str, dict[str, bool]]:
    """What freezing a module changes beside `requires_grad`, by its name."""
    modes = ("training", "track_running_stats")  # the second is BatchNorm's
    return {
        name: {mode: vars(module)[mode] for mode in modes if mode in vars(module)}
        for name, module in model.named_modules()
    }


def why_stopped(trainer: Trainer) -> str:
    """Why a run wants to stop before its end; empty where it does not, or a time limit ends it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    timers = [each for each in callbacks if isinstance(each, Timer)]
    if not trainer.should_stop or any((each.time_remaining() or 1) <= 0 for each in timers):
        return ""
    reasons = (x.stopping_reason_message for x in callbacks if isinstance(x, EarlyStopping))
    return next(filter(None, reasons), "trainer.should_stop was set")
