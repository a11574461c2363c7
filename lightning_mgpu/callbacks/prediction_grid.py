"""The first test images with label and prediction, as a picture."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.pictures import class_names, logits_and_labels, save_picture


class PredictionGrid(Callback):
    """Shows the first test images with label and prediction, wrong ones in red, as `predictions.png`.

    Needs batches (X, y) of images (N, C, H, W) and one class index each, and a `test_step` that returns a dict with
    `logits`; other models get no picture.

    Args:
        num_images: How many, in rows of eight.
    """

    def __init__(self, num_images: int = 24) -> None:
        self.num_images = num_images

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        found = logits_and_labels(outputs, batch) if batch_idx == 0 and trainer.is_global_zero else None
        if found is None or not is_image_batch(batch[0]):
            return
        X, logits, y = (tensor[: self.num_images].cpu() for tensor in (batch[0], *found))
        names = class_names(trainer, logits.shape[1])
        if ((y >= 0) & (y < len(names))).all():  # -100 is cross-entropy's 'no class'
            save_picture(trainer, draw(X, y, logits.argmax(1), names), "predictions.png")


def is_image_batch(X: Any) -> bool:
    return isinstance(X, Tensor) and X.ndim == 4 and X.shape[1] in (1, 3, 4)


def draw(X: Tensor, y: Tensor, predictions: Tensor, names: list[str]) -> Figure:
    rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 1.9 * rows), layout="constrained")
    for i, (image, label, prediction) in enumerate(zip(X, y.tolist(), predictions.tolist())):
        axes = figure.add_subplot(rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).float().numpy(), cmap="gray")
        axes.set_axis_off()
        if label == prediction:
            axes.set_title(names[label], fontsize=9)
        else:
            axes.set_title(f"{names[prediction]}\n(is: {names[label]})", fontsize=9, color="red")
    return figure
