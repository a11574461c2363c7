"""The first test images with label and prediction: a picture, and a table in Weights & Biases."""

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.pictures import class_names, logits_and_labels, save_picture, wandb_loggers
from lightning_mgpu.tracking.in_time import in_time


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
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        found = logits_and_labels(outputs, batch) if batch_idx == 0 else None
        if found is not None and isinstance(batch[0], Tensor) and batch[0].ndim == 4 and batch[0].shape[1] in (1, 3, 4):
            most = max(self.num_images, self.num_rows)
            X, logits, y = (tensor[:most].cpu() for tensor in (batch[0], *found))
            if ((y >= 0) & (y < logits.shape[1])).all():  # -100 is cross-entropy's 'no class'
                self._shown = X, y, logits.float().softmax(dim=1)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shown is None or not trainer.is_global_zero:
            return
        names = class_names(trainer, self._shown[-1].shape[1])
        X, y, probabilities = (tensor[: self.num_images] for tensor in self._shown)
        save_picture(trainer, draw(X, y, probabilities, names), "predictions.png")
        for logger in wandb_loggers(trainer):
            X, y, probabilities = (tensor[: self.num_rows] for tensor in self._shown)
            columns, rows = table(X, y, probabilities, names)
            in_time("the table of predictions", partial(logger.log_table, "predictions_table", columns, rows))


def draw(X: Tensor, y: Tensor, probabilities: Tensor, names: list[str]) -> Figure:
    rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 1.9 * rows), layout="constrained")
    for i, (image, label, prediction) in enumerate(zip(X, y, probabilities.argmax(dim=1))):
        right = bool(label == prediction)
        axes = figure.add_subplot(rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).float().numpy(), cmap="gray")
        title = names[label] if right else f"{names[prediction]}\n(is: {names[label]})"
        axes.set_title(title, fontsize=9, color="black" if right else "red")
        axes.set_axis_off()
    return figure


def table(X: Tensor, y: Tensor, probabilities: Tensor, names: list[str]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: the image, its class, the prediction, whether that is right, and how sure the model is."""
    import wandb

    sure, predictions = probabilities.max(dim=1)
    rows = [
        [wandb.Image(image), names[label], names[prediction], label == prediction, probability]
        for image, label, prediction, probability in zip(X, y.tolist(), predictions.tolist(), sure.tolist())
    ]
    return ["image", "label", "prediction", "right", "probability"], rows
