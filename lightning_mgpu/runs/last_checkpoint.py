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
from lightning_mgpu.runs.checkpoint_file import (
    CHECKPOINT_KEY,
    LAST,
    SECTIONS,
    check_readable,
)
from lightning_mgpu.runs.csv_logger import find_csv_logger
from lightning_mgpu.runs.resume import record_newest
from lightning_mgpu.seeds import VERSION, seed_generators


class LastCheckpoint(Callback):
    """Saves `last.ckpt` after every epoch, and resumes from checkpoints.

    Must be first among the callbacks: it saves the finished epoch before any other callback changes
    something for the next one.

    Args:
        run_checkpoint: Its directory gets `last.ckpt`, if it keeps one.
        seed: Of the random numbers of a step, such as dropout's.
        config: Every checkpoint gets the configuration of model, data and seed.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self, run_checkpoint: RunCheckpoint, seed: int, config: dict[str, Any]) -> None:
        self.run_checkpoint = run_checkpoint
        self.seed = seed
        # what a module may have given torch before training, for example by rank: it counts, too
        self._seed_before: int | None = None
        self.config = {key: config.get(key) for key in SECTIONS}
        self.why_stopped = ""  # if the run has stopped by itself, as by EarlyStopping
        self._finished_an_epoch = False  # in this process
        self._finished_training = False  # in this process

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record_newest(trainer)
        self._handle_sigterm(trainer, pl_module)
        loop = trainer.fit_loop
        # of an epoch that was interrupted, no on_train_epoch_start comes
        self._finished_an_epoch = loop.restarted_mid_epoch
        if loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch:
            loaders = loop._combined_loader.flattened  # type: ignore[union-attr]
            if not all(hasattr(loader, "state_dict") for loader in loaders):
                raise UsageError(
                    "the checkpoint was saved within an epoch, and the data loader cannot tell "
                    "which batches are left: make it with lightning_mgpu.data.batch_loader, or "
                    "take a checkpoint from the end of an epoch"
                )

    def _handle_sigterm(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End as by Ctrl-C: with Lightning's handler the process would end with status 0."""
        if not SLURMEnvironment.detect():
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    on_validation_start = on_test_start = on_predict_start = _handle_sigterm

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._finished_an_epoch:
            self._save(trainer)
        self._finished_an_epoch = True
        if self._seed_before is None:
            self._seed_before = torch.initial_seed()
        seed_generators(self.seed + (self._seed_before << 64), "step", trainer.current_epoch)
        if (loop := trainer.fit_loop).is_resuming:
            # This epoch is a whole one, also after a checkpoint: Lightning counts its batches from
            # 0, and calls iter(loader) once more, after the seed above.
            loop.epoch_loop.restarting = False
            loop.epoch_loop.reset_restart_stage()
            loop.on_iteration_done()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finished_training = True
        self.why_stopped = why_stopped(trainer)
        if is_sharded(trainer):  # later no process can gather the shards
            self._save(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # loggers upload it after this
        if stage == "fit" and self._finished_training and not is_sharded(trainer):
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
        logger = find_csv_logger(trainer)
        checkpoint[CHECKPOINT_KEY] = {
            "config": self.config,
            "metrics": logger.read_rows() if logger else "",
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
        own = checkpoint.get(CHECKPOINT_KEY, {})
        run_dir = Path(trainer.default_root_dir).resolve()
        is_of_this_run = run_dir in Path(str(trainer.ckpt_path)).resolve().parents
        if is_of_this_run and (logger := find_csv_logger(trainer)):
            logger.restore_rows(own["metrics"])
        is_trained = own.get("is_trained")
        finetuning = [each for each in trainer.callbacks if isinstance(each, BaseFinetuning)]  # type: ignore[attr-defined]
        resumed = [each for each in finetuning if each.state_key in checkpoint["callbacks"]]
        if resumed and is_trained is None:
            raise UsageError(
                f"the checkpoint does not say what {type(resumed[0]).__name__} has thawed: another "
                "program saved it, or its parameters were sharded"
            )
        if is_of_this_run or resumed:
            # Lightning's callbacks forget what they have thawed (their issue 21901)
            set_trained(pl_module, is_trained or {})
        if is_of_this_run and (why := own.get("why_stopped")):
            self.why_stopped = why
            trainer.should_stop = True  # which ends it before the next epoch
        else:
            has_these_streams = own.get("streams") == VERSION
            window = trainer.accumulate_grad_batches
            set_progress(checkpoint["loops"]["fit_loop"], has_these_streams, window)

    def _save(self, trainer: Trainer) -> None:
        """Save `last.ckpt` whole: a kill leaves the old one. All take part, the first writes."""
        if not self.run_checkpoint.saves_last or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        last = Path(str(self.run_checkpoint.dirpath), LAST)
        self.run_checkpoint.last_model_path = str(last)
        with replacing(last) if trainer.is_global_zero else nullcontext(last) as path:
            trainer.save_checkpoint(path, self.run_checkpoint.save_weights_only)
            check_readable(trainer, path)
        record_newest(trainer)


# What Lightning has counted when N epochs are over, and what it must find to go on as if it had
# never stopped. Its counts of epochs are ready/started/processed/completed.
#
# | saved                         | epochs        | last batch | set to               | why        |
# | ----------------------------- | ------------- | ---------- | -------------------- | ---------- |
# | last.ckpt: as epoch N starts  | N+1/N/N/N     | yes        | N/N/N/N, no loader   | (a), (b)   |
# | last.ckpt: after training     | N/N/N/N       | yes        | no loader            | (b)        |
# | best: at an epoch's end       | N+1/N+1/N+1/N | yes        | all N+1, no loader   | (a), (b)   |
# | best: after a validation      | N+1/N+1/N/N   | yes        | no loader            | (b), (c)   |
# | after the last step           | N+1/N+1/N/N   | yes        | refused              | (d)        |
# | after some steps, by a signal | N+1/N+1/N/N   | no         | batches of loader    | (e)        |
# | the end by max_steps, time    | N/N/N/..      | no         | refused              | (f)        |
#
# (a) Else Lightning takes the old epoch's batches for those of the new one and skips it, or, with
#     max_steps, counts the old epoch twice: the next one would have the batches of a later one.
# (b) Else the loader resumes behind its last batch.
# (c) Lightning itself completes the epoch, whose batches are all trained.
# (d) Lightning skips the epoch's validation and all hooks up to the next epoch's second batch.
# (e) Lightning prefetches one batch, which the loader's count has, but which was not trained.
# (f) The epoch's end has run, but its batches were not all trained.
def set_progress(loop: dict[str, Any], has_these_streams: bool, window: int) -> None:
    """Set the state of Lightning's `fit_loop` in a checkpoint, in place, as in the table above.

    Args:
        loop: The state.
        has_these_streams: Whether the batches were drawn by this version of the package.
        window: How many batches are accumulated for one step of the optimizer.

    Raises:
        UsageError: If no run can go on from there.
    """
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    total = epochs["total"]
    if batches["is_last_batch"]:
        if batches["total"]["completed"] < batches["total"]["processed"]:
            raise UsageError(
                "the checkpoint was saved after the last step of an epoch, but before its "
                "validation and its end: take last.ckpt, or one from within an epoch"
            )
        loop["state_dict"].pop("combined_loader", None)
        if total["processed"] == total["started"]:  # the epoch is over
            for counts in epochs.values():
                counts["ready"] = counts["completed"] = counts["processed"]
    elif batches["total"]["ready"] and total["processed"] == total["ready"]:
        raise UsageError(
            "the run ended within an epoch, by max_steps or max_time: no run can go on from "
            "its last.ckpt; test, predict and export take it"
        )
    elif (num_batches := batches["current"]["processed"]) % window:
        raise UsageError(
            f"the checkpoint was saved after {num_batches} batches of an epoch, within the "
            f"{window} of --trainer.accumulate_grad_batches: their gradients are not in it"
        )
    for loader in loop["state_dict"].get("combined_loader", []):
        if "num_yielded" in loader:
            if not has_these_streams:
                raise UsageError(
                    "the checkpoint was saved within an epoch by another version of this "
                    "package, which had other batches: take one from the end of an epoch"
                )
            loader["num_yielded"] = batches["current"]["processed"]


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
