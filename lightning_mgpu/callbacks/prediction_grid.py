"""The first test images with label and prediction: a picture, and a table in Weights & Biases."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.classes import class_names, logits_and_labels
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing
from lightning_mgpu.runs.in_time import in_time


class PredictionGrid(Callback):
    """Shows the first test images with label and prediction, wrong ones in red, as `predictions.png`; W&B gets a table.

    Needs batches (X, y) of images (N, C, H, W) and one class index each, and a `test_step` that returns a dict with
    `logits`; other models get no picture.

    Args:
        num_images: How many, in rows of eight.
        num_rows: Images of the first batch in W&B's table.
    """

    def __init__(self, num_images: int = 24, num_rows: int = 100) -> None:
        self.num_images = num_images
        self.num_rows = num_rows
        self._shown: tuple[Tensor, Tensor, Tensor] | None = None

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        found = logits_and_labels(outputs, batch) if batch_idx == 0 else None
        if found is not None and isinstance(batch[0], Tensor) and batch[0].ndim == 4 and batch[0].shape[1] in (1, 3, 4):
            most = max(self.num_images, self.num_rows)
            X, logits, y = (tensor[:most].cpu() for tensor in (batch[0], *found))
            if ((y >= 0) & (y < logits.shape[1])).all():  # -100 is cross-entropy's 'no class'
                self._shown = X, y, logits.float().softmax(dim=1)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        directory = run_directory(trainer)
        if directory is None or self._shown is None:
            return
        classes = class_names(trainer, self._shown[-1].shape[1])
        path = directory / "predictions.png"
        X, y, probabilities = (tensor[: self.num_images] for tensor in self._shown)
        with replacing(path) as part:
            self._draw(X, y, probabilities, classes).savefig(part, dpi=100, format="png")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("predictions", [str(path)])
                columns, rows = self._table(*self._shown, classes)
                in_time("the table of predictions", partial(logger.log_table, "predictions_table", columns, rows))

    @staticmethod
    def _draw(X: Tensor, y: Tensor, probabilities: Tensor, classes: Sequence) -> Figure:
        rows = -(-len(X) // 8)
        figure = Figure(figsize=(12, 1.9 * rows), layout="constrained")
        for i, (image, label, prediction) in enumerate(zip(X, y, probabilities.argmax(dim=1))):
            right = bool(label == prediction)
            title = f"{classes[label]}" if right else f"{classes[prediction]}\n(is: {classes[label]})"
            axes = figure.add_subplot(rows, 8, i + 1)
            axes.imshow(image.permute(1, 2, 0).float().numpy(), cmap="gray")
            axes.set_title(title, fontsize=9, color="black" if right else "red")
            axes.set_axis_off()
        return figure

    def _table(self, X: Tensor, y: Tensor, probabilities: Tensor, classes: Sequence) -> tuple[list[str], list[list]]:
        """Columns and rows: the image, its class, the prediction, whether that is right, and how sure the model is."""
        import wandb

        sure, predictions = probabilities.max(dim=1)
        columns = [X, y.tolist(), predictions.tolist(), sure.tolist()]
        rows = [
            [wandb.Image(image), str(classes[label]), str(classes[prediction]), label == prediction, probability]
            for image, label, prediction, probability in list(zip(*columns))[: self.num_rows]
        ]
        return ["image", "label", "prediction", "right", "probability"], rows
