"""The checkpoint of the best epoch, which `fit` tests.

--checkpoint.save_top_k=3  # and whatever else Lightning's ModelCheckpoint takes
--checkpoint.monitor=val_loss
"""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_mgpu.errors import UsageError
from lightning_mgpu.protocols import data_facts
from lightning_mgpu.runs.checkpoint_file import LAST, check_readable

VAL_ACC = "val_acc"
# words in the names of metrics
LARGER = "acc accuracy f1 auc auroc auprc ap map precision recall iou dice r2 bleu psnr ssim"
SMALLER = "loss error err mae mse rmse nll perplexity ppl wer cer"
# what Lightning adds to a name
ADDED = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")


class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` in the run directory; watches `val_acc` wherever it is logged.

    Args:
        monitor: The metric to watch. Left out: the largest `val_acc`, unless the model validates on
            the test set, which must not choose the model.
        mode: Whether the least (`min`) or the largest (`max`) value of `monitor` is the best. Left
            out: what `higher_is_better` of a logged torchmetrics object says, or else the name, as
            `loss` and `acc` do.
        save_last: Save `last.ckpt` after every epoch, from which `--resume` goes on.

    Raises:
        UsageError: If neither says which value is the best, when the metric is first logged.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(
        self,
        monitor: str | None = None,
        mode: str | None = None,
        save_last: bool = True,
        **kwargs: Any,
    ) -> None:
        by_step = bool(kwargs.get("every_n_train_steps") or kwargs.get("train_time_interval"))
        self.is_automatic = monitor is None and not by_step
        if self.is_automatic:
            monitor, mode = VAL_ACC, "max"
        super().__init__(
            dirpath=None,  # the run directory's, see setup
            monitor=monitor,
            mode=mode or "min",
            save_last=False,  # it would be saved at a new best alone
            enable_version_counter=False,  # see _get_metric_interpolated_filepath_name
            **kwargs,
        )
        self.keep_last = save_last
        self.is_dev_run = False  # which saves nothing
        self.has_mode = mode is not None or monitor is None

    @property
    @override
    def state_key(self) -> str:
        return "RunCheckpoint"  # when a run is resumed, the mode is not known yet

    @property
    def saves_last(self) -> bool:
        """Whether there is a `last.ckpt` after every epoch, in a Trainer that has checkpoints."""
        return self.keep_last and self.dirpath is not None

    @property
    def best_path(self) -> str | None:
        """The best checkpoint, if any. A kill may have come before its file was replaced."""
        return self.best_model_path if Path(self.best_model_path).is_file() else None

    @property
    def best_epoch(self) -> int | None:
        """The epoch of the best checkpoint, if any. It counts from 1."""
        if self.best_path is None:
            return None
        checkpoint = torch.load(self.best_path, map_location="cpu", weights_only=True, mmap=True)
        return int(checkpoint["epoch"]) + 1

    def describe(self) -> str:
        """Which checkpoint is tested: `epoch 1: val_f1 1.0000 (largest)`."""
        if self.dirpath is None or self.is_dev_run:
            return "the last epoch: no checkpoints are saved"
        if self.best_path is None:
            missing = f"{self.best_model_path} is not there"
            none = "no metric says which one is the best"
            return f"the last epoch: {missing if self.best_model_path else none}"
        epoch = f"epoch {self.best_epoch}"
        if self.monitor is None or self.best_model_score is None:
            return f"{epoch}: the last one saved by --checkpoint"
        which = "largest" if self.mode == "max" else "smallest"
        return f"{epoch}: {self.monitor} {float(self.best_model_score):.4f} ({which})"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.is_dev_run = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        self.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))  # whatever the loggers
        super().setup(trainer, pl_module, stage)

    @override
    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        """Called wherever a checkpoint may be saved, first in Lightning's sanity check."""
        if self.is_automatic:
            on_test_set = data_facts(trainer).validates_on_test_set
            if on_test_set or VAL_ACC not in trainer.callback_metrics:
                return True
        if not self.has_mode and trainer.state.fn == "fit":
            self._choose_mode(trainer)
        return super()._should_skip_saving_checkpoint(trainer)

    def _choose_mode(self, trainer: Trainer) -> None:
        name = ADDED.sub("", str(self.monitor))
        loop = trainer.fit_loop.epoch_loop
        logged = [*loop.val_loop._results.values(), *loop._results.values()]
        values = [each.value for each in logged if each.meta.name in (name, self.monitor)]
        if not values and self.monitor not in trainer.callback_metrics:
            return  # it is not logged yet
        for value in values:
            if isinstance(value, Metric) and value.higher_is_better is not None:
                return self._set_mode("max" if value.higher_is_better else "min")
        words = set(re.split(r"[^a-z0-9]+", name.lower()))
        is_larger, is_smaller = words & set(LARGER.split()), words & set(SMALLER.split())
        if bool(is_larger) == bool(is_smaller):
            raise UsageError(
                f"--checkpoint.monitor={self.monitor}: is the largest value the best, or the "
                "smallest? Add --checkpoint.mode=max or --checkpoint.mode=min"
            )
        return self._set_mode("max" if is_larger else "min")

    def _set_mode(self, mode: str) -> None:
        self.has_mode, self.mode = True, mode
        self.kth_value = torch.tensor(-torch.inf if mode == "max" else torch.inf)

    @override
    def _get_metric_interpolated_filepath_name(
        self,
        monitor_candidates: dict[str, Tensor],
        trainer: Trainer,
        del_filepath: str | None = None,
    ) -> str:
        """A name that no other checkpoint has which is kept; an epoch trained again has its own."""
        path, version = self.format_checkpoint_name(monitor_candidates), self.STARTING_VERSION
        while path in self.best_k_models or path == str(Path(str(self.dirpath), LAST)):
            path = self.format_checkpoint_name(monitor_candidates, ver=version)
            version += 1
        return path

    @override
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        check_readable(trainer, Path(filepath))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mode": self.mode if self.has_mode else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over this run's best, wherever its directory is, and nothing of another run."""
        here, before = Path(str(self.dirpath)), state_dict["dirpath"]

        def moved(path: str) -> str:
            return str(here / Path(path).relative_to(before)) if path else ""

        if (here / LAST).exists():
            if state_dict["mode"]:
                self._set_mode(state_dict["mode"])
            state = {**state_dict, "dirpath": self.dirpath}
            for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[key] = moved(state[key])
            scores = state["best_k_models"].items()
            state["best_k_models"] = {moved(path): score for path, score in scores}
            super().load_state_dict(state)
