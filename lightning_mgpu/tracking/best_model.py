"""The best checkpoint as an artifact of the Weights & Biases run."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_mgpu.checkpoint_io import best_there_is
from lightning_mgpu.tracking.in_time import in_time

if TYPE_CHECKING:
    from wandb import Run


class UploadBest(Callback):
    """Uploads the best checkpoint when `fit` ends: the last one, where nothing says which is best.

    `WandbLogger(log_model=True)` would upload both, and asks the server whether it may, for as long as that takes.

    Args:
        run: The online run it belongs to.
        seconds: How long the server may take to accept it; the upload itself goes on beside what follows.
    """

    def __init__(self, run: "Run", seconds: float) -> None:
        self.run = run
        self.seconds = seconds

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint = trainer.checkpoint_callback
        if not isinstance(checkpoint, ModelCheckpoint):
            return
        if path := best_there_is(checkpoint):
            in_time(f"the best checkpoint, {path},", lambda: self._log(Path(path), checkpoint), self.seconds)

    def _log(self, path: Path, checkpoint: ModelCheckpoint) -> None:
        import wandb

        score = checkpoint.best_model_score
        metadata = {"monitor": checkpoint.monitor, "score": None if score is None else float(score)}
        artifact = wandb.Artifact(f"model-{self.run.id}", type="model", metadata=metadata)
        artifact.add_file(str(path), name="model.ckpt", policy="immutable")  # no copy of it is made
        self.run.log_artifact(artifact, aliases=["best"])
