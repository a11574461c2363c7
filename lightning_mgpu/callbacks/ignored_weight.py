"""A warning where the strategy ignores the weight of a loss."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override


class IgnoredWeight(Callback):
    """Warns once if `training_step` returns a weight and the strategy does not use it."""

    edits_nothing = True

    def __init__(self) -> None:
        self._has_warned = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        if self._has_warned or not isinstance(outputs, Mapping) or "weight" not in outputs:
            return
        self._has_warned = True
        uses_it = getattr(trainer.strategy, "weighs_losses", False)
        if pl_module.automatic_optimization and not uses_it:
            rank_zero_warn(
                f"training_step returns a weight, which {type(trainer.strategy).__name__} ignores: "
                "--trainer.strategy=manual_allreduce and dp weigh losses by it, on one device too."
            )
