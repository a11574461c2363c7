"""Checkpoints: atomic writes, the best epoch, which `fit` tests, and the last epoch.

`--resume` continues from `last.ckpt`, which is saved when the next epoch starts: by then the epoch
is logged and validated, and its schedulers have stepped. Every epoch is seeded (`seeds.py`).
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

END = "end.ckpt"  # the final weights of a run that stopped within an epoch
KEY = "lightning_mgpu"  # of the entries that `LastCheckpoint` adds to a checkpoint
IS_KNOWN = re.compile("(loss|(?<![a-z])acc(uracy)?)$")  # metrics whose mode is known
PREFIX = re.compile(r"(module\.|model\.|net\.|_orig_mod\.)*")  # of names of weights


def read_checkpoint(path: str | Path, bare: bool = False) -> dict[str, Any]:
    """Read a Trainer's checkpoint or a `bare` state_dict, without executing code."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; the checkpoints of a run are in checkpoints/")
    try:
        # torch does not verify its checksums; files before torch 1.6 are not zip files
        damaged = zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip()
        checkpoint = {} if damaged else dict(torch.load(path, "cpu", weights_only=True))
    except Exception:  # damaged files cause many kinds of errors
        checkpoint = {}
    if bare and checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return {"state_dict": checkpoint}
    if "state_dict" not in checkpoint:
        reason = "damaged, not of a Trainer, or with objects that torch.load considers unsafe"
        raise UsageError(f"{path} cannot be read: {reason}")
    return checkpoint


def load_weights(module: LightningModule, path: str) -> list[str]:
    """Load weights from a file, whose names may have a different prefix; return skipped names.

    With `strict_loading=False`, names without a counterpart of the same shape are skipped.
    """
    own, given = module.state_dict(), read_checkpoint(path, bare=True)["state_dict"]
    missing = {PREFIX.sub("", name): name for name in own if name not in given}
    given = {n if n in own else missing.get(PREFIX.sub("", n), n): given[n] for n in given}
    strict = module.strict_loading  # True: raises for mismatches
    fits = [n for n in given if strict or (n in own and given[n].shape == own[n].shape)]
    if not fits:
        raise UsageError(f"{path} has no matching weights: {[*given][:3]}, not {[*own][:3]}")
    module.load_state_dict({name: given[name] for name in fits}, strict=strict)
    return [name for name in own | given if name not in fits]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically: if killed, the previous file, or none, is left."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        plain = tree_map_only(
            (np.float64, np.integer, np.bool_),  # not np.float32: as a float it prints more digits
            lambda number: number.item(),
            checkpoint,
            is_leaf=lambda part: hasattr(part, "_metadata"),  # of a state_dict; copies lose it
        )
        torch.save(plain, content := BytesIO())
        content.seek(0)
        if classes := get_unsafe_globals_in_checkpoint(content):  # such as NumPy arrays
            raise UsageError(f"{path} would be unreadable: it contains objects of {classes}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(path)) as part:
            part.write_bytes(content.getbuffer())

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(path)


class BestCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` in the run directory; `fit` tests the best checkpoint.

    Args:
        monitor: Metric to monitor, if it is logged. Test metrics are not supported.
        mode: Default: `min` for a loss, `max` for an accuracy. Required for other metrics.

    Raises:
        ValueError: If `mode` is missing, or if `monitor` would be stale when a checkpoint is saved.
    """

    def __init__(
        self,
        monitor: str | None = "val_acc",
        mode: Literal["min", "max"] | None = None,
        **kwargs: Any,
    ) -> None:
        if monitor and mode is None and not IS_KNOWN.search(monitor):
            raise ValueError(f"--checkpoint.monitor={monitor}: add --checkpoint.mode=min or max")
        by_steps = kwargs.get("every_n_train_steps") or kwargs.get("train_time_interval")
        if by_steps and (monitor or "").startswith("val"):
            reason = "would be stale between validations: add --checkpoint.monitor=null"
            raise ValueError(f"--checkpoint.monitor={monitor}: {reason}")
        super().__init__(
            dirpath=None,  # `RunRecord` sets it
            monitor=monitor,
            mode=mode or ("min" if "loss" in (monitor or "") else "max"),
            save_last=False,  # Lightning's is the last *best* checkpoint
            enable_version_counter=False,
            **kwargs,
        )
        self.has_validated = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.monitor and getattr(trainer.datamodule, "validates_on_test_set", False):  # type: ignore[attr-defined]
            self.save_top_k = 0  # never select on the test set
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
        return f"--checkpoint.monitor={self.monitor} was not logged; logged metrics: {logged}"

    @property
    def best(self) -> dict[str, Any]:
        """Epoch (from 1), metric, value and path of the best checkpoint, if any."""
        path = Path(self.best_model_path)  # elsewhere if the run was copied or moved
        if not path.is_file() or not path.is_relative_to(str(self.dirpath)):
            return {}
        epoch = read_checkpoint(path)["epoch"] + 1
        value = float(self.best_model_score) if self.best_model_score is not None else None
        return {"epoch": epoch, "monitor": self.monitor, "value": value, "path": str(path)}


class LastCheckpoint(Callback):
    """Saves `last.ckpt` after every epoch, seeds every epoch, and resumes at the next epoch.

    It is the first callback, so that it saves before others change anything for the next epoch.
    """

    def __init__(self, seed: int, saves: bool, weights: str | None = None) -> None:
        self.seed, self.saves, self.weights = seed, saves, weights
        self.is_saving = self.has_finished = False
        self.first_epoch = 0  # of this process
        self.loaded_metrics: dict[str, Any] = {}
        self.num_optimizers: int | None = None  # in the checkpoint to resume from
        self.frozen: list[str] | None = None  # parameters in that checkpoint
        self.modes: dict[str, dict[str, bool]] = {}  # of modules, at the start of an epoch
        self.why_stopped = ""  # for example by EarlyStopping

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.weights:
            if (skipped := load_weights(pl_module, self.weights)) and trainer.is_global_zero:
                print(f"{self.weights}: skipped {printable(', '.join(skipped))}")
            self.weights = None  # the test after `fit` loads a checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        has, num = bool(trainer.ckpt_path), len(trainer.optimizers)
        if trainer.strategy.broadcast(has) != has:
            raise UsageError("only some machines have the run's last.ckpt: use a shared disk")
        if self.num_optimizers not in (None, num):  # Lightning would restore some
            reason = f"contains {self.num_optimizers} optimizer states, but the model has {num}"
            raise UsageError(f"{trainer.ckpt_path} {reason}: start a new run with --weights")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_epoch = trainer.current_epoch
        trainer.callback_metrics.update(self.loaded_metrics)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > self.first_epoch:
            self.modes = read_modes(pl_module)
            self.save(trainer, LAST)
        elif self.frozen is not None:  # after all hooks that freeze layers at the start
            for name, p in pl_module.named_parameters():  # BackboneFinetuning does not restore it
                p.requires_grad_(name not in self.frozen)
            for name, module in pl_module.named_modules():
                vars(module).update(self.modes.get(name, {}))
        seed_generators(self.seed, "step", trainer.current_epoch)
        if (loop := trainer.fit_loop).is_resuming:
            # else Lightning would assign the batches of the last epoch to this one. This resets the
            # count, and calls iter(loader) again, after seeding.
            loop.epoch_loop.restarting = False
            loop.on_iteration_done()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_finished, self.why_stopped = True, why_stopped(trainer)
        self.modes = read_modes(pl_module)  # before another callback's `eval()` at the end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.has_finished:
            is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self.save(trainer, LAST if is_whole else END)
            if is_whole and self.saves:  # left by an earlier part of the run
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
            metrics = dict(trainer.callback_metrics)  # read by ReduceLROnPlateau
            frozen = [name for name, p in pl_module.named_parameters() if not p.requires_grad]
            checkpoint[KEY] = {"streams": VERSION, "metrics": metrics, "frozen": frozen}
            checkpoint[KEY] |= {"modes_by_name": self.modes, "why_stopped": why_stopped(trainer)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            checkpoint["callbacks"] = {}  # evaluation needs only weights
            checkpoint["current_model_state"] = checkpoint["state_dict"]  # WeightAveraging's
            return
        if KEY not in checkpoint and trainer.optimizers:
            return  # a callback, such as LearningRateFinder, restores its own checkpoint
        loop = checkpoint["loops"]["fit_loop"]
        is_whole = loop["epoch_loop.batch_progress"]["is_last_batch"]
        if KEY not in checkpoint or not is_whole:  # such as Lightning's under SLURM
            raise UsageError(f"{trainer.ckpt_path} was saved within an epoch: move it away")
        if EXCHANGE in checkpoint and not hasattr(trainer.strategy, "exchange"):
            raise UsageError(f"{trainer.ckpt_path} is of an exchange: use the same strategy")
        self.loaded_metrics, self.frozen = checkpoint[KEY]["metrics"], checkpoint[KEY]["frozen"]
        self.num_optimizers = len(checkpoint["optimizer_states"])
        self.modes = checkpoint[KEY].get("modes_by_name", {})  # missing in older files
        if why := checkpoint[KEY]["why_stopped"]:
            self.why_stopped, trainer.should_stop = why, True
        for counts in loop["epoch_progress"].values():
            counts["ready"] = counts["started"]  # the next epoch has not started
        loop["state_dict"].pop("combined_loader", None)  # start at the first batch


def read_modes(model: LightningModule) -> dict[str, dict[str, bool]]:
    """The modes that freezing changes in addition to `requires_grad`, by name of module."""
    modes = ("training", "track_running_stats")  # the second is BatchNorm's
    return {
        name: {mode: vars(module)[mode] for mode in modes if mode in vars(module)}
        for name, module in model.named_modules()
    }


def why_stopped(trainer: Trainer) -> str:
    """Why a run stops early; empty if it does not, or if a time limit ends it."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    timers = [timer for timer in callbacks if isinstance(timer, Timer)]
    if not trainer.should_stop or any((timer.time_remaining() or 1) <= 0 for timer in timers):
        return ""
    reasons = (x.stopping_reason_message for x in callbacks if isinstance(x, EarlyStopping))
    return next(filter(None, reasons), "trainer.should_stop was set")
