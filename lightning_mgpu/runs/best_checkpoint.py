"""The checkpoint of the best epoch, which `fit` tests and W&B gets.

--checkpoint.save_top_k=3                         # and whatever else Lightning's ModelCheckpoint takes
--checkpoint.monitor=val_loss
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_mgpu.runs.checkpoint_file import LAST

VAL_ACC = "val_acc"


class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` in the run directory, which watches `val_acc` wherever it is logged.

    Args:
        monitor: The metric to watch. Left out: the largest `val_acc`, unless the model validates on the test set, which
            must not choose the model.
        mode: Whether the least (`min`) or the largest (`max`) value of `monitor` is the best.
        save_last: Save `last.ckpt` after every epoch, from which `--resume` goes on.
    """

    def __init__(
        self,
        *args: Any,
        monitor: str | None = None,
        mode: str = "min",
        save_last: bool = True,
        enable_version_counter: bool = False,  # an epoch that is trained again after a kill replaces its file
        **kwargs: Any,
    ) -> None:
        if kwargs.get("dirpath"):
            raise ValueError("--checkpoint.dirpath: checkpoints are kept in the run directory; name it with --run_dir")
        by_step = bool(kwargs.get("every_n_train_steps") or kwargs.get("train_time_interval"))
        self.is_automatic = monitor is None and not by_step
        if self.is_automatic:
            monitor, mode = VAL_ACC, "max"
        super().__init__(  # type: ignore[misc]
            *args,
            monitor=monitor,
            mode=mode,
            save_last=False,
            enable_version_counter=enable_version_counter,
            **kwargs,
        )
        self.keep_last = save_last

    @property
    def best(self) -> str | None:
        """The best checkpoint, if there is one. A kill may have come before its file was replaced."""
        return self.best_model_path if Path(self.best_model_path).is_file() else None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))  # whatever the loggers
        super().setup(trainer, pl_module, stage)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._can_tell(trainer):
            super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._can_tell(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _can_tell(self, trainer: Trainer) -> bool:
        on_test_set = getattr(trainer.datamodule, "validates_on_test_set", False)  # type: ignore[attr-defined]
        return not self.is_automatic or (VAL_ACC in trainer.callback_metrics and not on_test_set)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best of this run, wherever its directory was moved, and nothing of another run."""
        here = Path(str(self.dirpath))
        if (here / LAST).exists():
            state = {**state_dict, "dirpath": self.dirpath}
            for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[key] = str(here / Path(state[key]).name) if state[key] else ""
            scores = state["best_k_models"].items()
            state["best_k_models"] = {str(here / Path(path).name): score for path, score in scores}
            super().load_state_dict(state)
