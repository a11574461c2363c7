"""A warning where processes do not share the global batch, but take batches of their own."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mgpu.data.batches import GlobalBatches


class GlobalBatchCheck(Callback):
    """Looks at the loaders that train in several processes: of a plain `DataLoader`, everyone takes its batch size."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        plain = [loader for loader in loaders if not isinstance(getattr(loader, "sampler", None), GlobalBatches)]
        if trainer.world_size > 1 and plain:
            own = getattr(plain[0], "batch_size", None)
            whole = f"{trainer.world_size} x {own} = {trainer.world_size * own}" if own else f"{trainer.world_size} x"
            rank_zero_warn(
                f"each of the {trainer.world_size} processes takes batches of its own: in all {whole} samples; "
                "make the loader with lightning_mgpu.data.batch_loader(dataset, batch_size, self.trainer, "
                "shuffle=True), which deals one batch out to all processes"
            )
