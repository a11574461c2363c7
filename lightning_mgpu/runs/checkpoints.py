"""`last.ckpt`, from which `--resume` goes on.

It is saved when the next epoch starts: then all of the epoch is logged, stepped and
validated. After the last epoch it is saved when `on_train_end` and `on_fit_end` are over, in which
callbacks and modules may set weights. Nothing of an epoch in progress is kept. Every epoch begins
with random numbers of its own (`seeds.py`), so that there is no state of generators to keep.
"""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_mgpu.devices import is_sharded
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replacing
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.checkpoint_file import KEY, LAST, check_readable
from lightning_mgpu.runs.csv_logger import csv_logger
from lightning_mgpu.runs.resume import record_newest
from lightning_mgpu.seeds import VERSION, seed_generators


class LastCheckpoint(Callback):
    """Saves `last.ckpt` after every epoch, and goes on from it.

    It stands before all other callbacks: what they do at an epoch's start belongs to it.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self, best: RunCheckpoint, seed: int, config: dict[str, Any]) -> None:
        self.best = best  # says where, and whether at all
        self.seed = seed  # of the random numbers of a step, such as dropout's
        # what a module may have given torch before training, for example by rank: it counts, too
        self._seed_before: int | None = None
        self.config = config  # of model, data and seed, for every checkpoint
        self.why_stopped = ""  # if the run has stopped by itself, as by EarlyStopping
        self._has_trained = False  # an epoch, in this process
        self._is_over = False  # the training, in this process
        self._starts_epoch = False  # the first one after a checkpoint

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record_newest(trainer)
        if not SLURMEnvironment.detect():
            # as Ctrl-C; Lightning's would end with status 0
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        loop = trainer.fit_loop
        # then no on_train_epoch_start comes for the epoch
        self._has_trained = loop.restarted_mid_epoch
        if loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch:
            loaders = loop._combined_loader.flattened  # type: ignore[union-attr]
            if not all(hasattr(loader, "state_dict") for loader in loaders):
                raise UsageError(
                    "the checkpoint was saved within an epoch, and the data loader cannot tell "
                    "which batches are left: make it with lightning_mgpu.data.batch_loader, or "
                    "take a checkpoint from the end of an epoch"
                )
        # Lightning would take the batches of the epoch before for those of this one
        if self._starts_epoch:
            # its setter knows better where max_steps is given
            loop._restarting = loop.epoch_loop.restarting = False
            loop.reset_restart_stage()
            loop.epoch_loop.reset_restart_stage()
            self._starts_epoch = False

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_trained:
            self._save(trainer)
        self._has_trained = True
        if self._seed_before is None:
            self._seed_before = torch.initial_seed()
        seed_generators(self.seed + (self._seed_before << 64), "step", trainer.current_epoch)
        if trainer.fit_loop.is_resuming and trainer.current_epoch:
            # a DataLoader had drawn its order too early
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_over = True
        self.why_stopped = why_stopped(trainer)
        if is_sharded(trainer):  # later no process can gather the shards
            self._save(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # loggers upload it after this
        if stage == "fit" and self._is_over and not is_sharded(trainer):
            self._save(trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":  # nothing is saved, and the connector has been given this already
            return
        connector = trainer._checkpoint_connector
        dump = connector.dump_checkpoint

        def dump_with_config(weights_only: bool | None = None) -> dict[str, Any]:
            """Lightning asks no callback where weights alone are saved; they need a model, too."""
            checkpoint = dump(weights_only)
            if weights_only:
                self.on_save_checkpoint(trainer, pl_module, checkpoint)
            return checkpoint

        connector.dump_checkpoint = dump_with_config  # type: ignore[method-assign]

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        logger = csv_logger(trainer)
        checkpoint[KEY] = {
            "config": self.config,
            "metrics": logger.text() if logger else "",
            "streams": VERSION,
            "max_epochs": trainer.max_epochs,
            "why_stopped": self.why_stopped,
            "is_trained": None if is_sharded(trainer) else find_trained(pl_module),
        }

    @override
    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        is_of_this_run = (
            Path(trainer.default_root_dir).resolve()
            in Path(str(trainer.ckpt_path)).resolve().parents
        )
        if is_of_this_run and (logger := csv_logger(trainer)):
            logger.go_on(checkpoint[KEY]["metrics"])
        is_trained = checkpoint.get(KEY, {}).get("is_trained")
        finetuning = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]  # type: ignore[attr-defined]
        go_on = [each for each in finetuning if each.state_key in checkpoint["callbacks"]]
        if go_on and is_trained is None:
            raise UsageError(
                f"the checkpoint does not say what {type(go_on[0]).__name__} has thawed: another "
                "program saved it, or its parameters were sharded"
            )
        if is_of_this_run or go_on:
            # Lightning's callbacks forget what they have thawed (their issue 21901)
            set_trained(pl_module, is_trained or {})
        if is_of_this_run and (why := checkpoint[KEY].get("why_stopped")):
            self.why_stopped = why
            trainer.should_stop = True  # which ends it before the next epoch
            return
        loop = checkpoint["loops"]["fit_loop"]
        batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]["total"]
        if batches["is_last_batch"]:
            # else the loader would go on where the epoch ended
            loop["state_dict"].pop("combined_loader", None)
            self._starts_epoch = epochs["completed"] == epochs["started"]
        elif batches["total"]["ready"] and epochs["processed"] == epochs["ready"]:
            raise UsageError(
                "the run ended within an epoch, by max_steps or max_time: no run can go on from "
                "its last.ckpt; test, predict and export take it"
            )
        for loader in loop["state_dict"].get("combined_loader", []):
            # with the batch that was fetched, but not trained, when a signal came
            if "num_yielded" in loader:
                if checkpoint.get(KEY, {}).get("streams") != VERSION:
                    raise UsageError(
                        "the checkpoint was saved within an epoch by another version of this "
                        "package, which had other batches: take one from the end of an epoch"
                    )
                loader["num_yielded"] = batches["current"]["processed"]
        if self._starts_epoch:
            for counts in loop["epoch_progress"].values():
                # the next epoch was about to start when this was saved
                counts["ready"] = counts["completed"]

    def _save(self, trainer: Trainer) -> None:
        """Save `last.ckpt` whole: a kill leaves the old one. All take part, the first writes."""
        if not self.best.keep_last or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        last = Path(str(self.best.dirpath), LAST)
        self.best.last_model_path = str(last)
        with replacing(last) if trainer.is_global_zero else nullcontext(last) as path:
            trainer.save_checkpoint(path, self.best.save_weights_only)
            check_readable(trainer, path)
        record_newest(trainer)


def find_trained(module: LightningModule) -> dict[str, bool]:
    """Whether a parameter is trained, and whether BatchNorm keeps its statistics, by name."""
    layers = [each for each in module.named_modules() if isinstance(each[1], _BatchNorm)]
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return trained | {name: layer.track_running_stats for name, layer in layers}


def set_trained(module: LightningModule, is_trained: dict[str, bool]) -> None:
    """Freeze and thaw as `find_trained` has found it."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad = is_trained.get(name, parameter.requires_grad)
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats = is_trained.get(name, layer.track_running_stats)


def why_stopped(trainer: Trainer) -> str:
    """Why a run that ends now has stopped by itself; empty if a limit of the Trainer ends it."""
    is_late = any(
        isinstance(callback, Timer) and (callback.time_remaining() or 1) <= 0
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
    if not trainer.should_stop or is_late:
        return ""
    by_epoch = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, EarlyStopping) or callback.stopping_reason_message is None:
            continue
        if callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
            num, unit = callback.wait_count, "epoch" if by_epoch else "validation"
            return f"{callback.monitor} has not improved for {num} {unit}{'s' * (num != 1)}"
        return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
    return "trainer.should_stop was set"
