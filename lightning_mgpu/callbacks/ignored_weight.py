"""A warning where the strategy ignores the weight of a loss."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mgpu.protocols import strategy_facts


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
        if not pl_module.automatic_optimization:
            rank_zero_warn(
                "training_step returns a weight, which manual optimization ignores: call "
                "self.manual_backward(loss, weight=n), under --trainer.strategy=manual_allreduce "
                "or dp."
            )
        elif not strategy_facts(trainer.strategy).weighs_losses:
            rank_zero_warn(
                f"training_step returns a weight, which {type(trainer.strategy).__name__} ignores: "
                "--trainer.strategy=manual_allreduce and dp weigh losses by it, on one device too."
            )
