"""Pictures of a test of a classifier: confusion matrix and misclassified images."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix as Matrix

from lightning_mgpu.callbacks.curve import save_picture
from lightning_mgpu.tools import errors_as_warnings

IGNORED_LABEL = -100  # as in torch's losses
NUM_IMAGES, MAX_CLASSES = 24, 50  # of predictions.png; of a confusion matrix


class TestPictures(Callback):
    """Draws a confusion matrix (`confusion.png`) and misclassified images (`predictions.png`).

    Requires batches (X, y), or as a `Classifier` accepts, with labels y (N,) (-100 is
    ignored), and a `test_step` that returns a dict with `logits` (N, C). Draws the images X
    (N, 1 or 3, H, W) of process 0; if the inputs are a dict, X is its first entry.
    """

    confusion: Matrix | None = None
    mistakes: list[tuple[Tensor, int, int]]  # image, label, prediction

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mistakes, self.confusion = [], None

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *at: int
    ) -> None:
        read: Any = getattr(pl_module, "inputs_and_target", lambda batch: batch)
        with suppress(ValueError):  # an overridden `test_step` may accept more batches
            batch = read(batch)
        match outputs, batch, sum(at[1:]):  # of the first loader
            case {"logits": Tensor(ndim=2) as logits}, [inputs, Tensor(ndim=1) as y], 0:
                X = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
            case _:
                return  # not a classifier
        if y.is_floating_point() or logits.shape[1] == 1:
            return  # regression, or one logit: no classes
        self.names = names = label_names(trainer, logits.shape[1])
        with errors_as_warnings("confusion.png"):
            if at[0] == 0 and len(names) <= MAX_CLASSES:
                self.confusion = Matrix(len(names), IGNORED_LABEL, validate_args=False).to(y.device)
            if self.confusion is not None:
                self.confusion.update(logits.detach(), y)
        with errors_as_warnings("predictions.png"):
            if isinstance(X, Tensor) and X.ndim == 4 and X.shape[1] in (1, 3):
                found, num_left = logits.argmax(1), NUM_IMAGES - len(self.mistakes)
                is_wrong = (found != y) & (y != IGNORED_LABEL)
                for i in is_wrong.nonzero().flatten()[:num_left].tolist():
                    self.mistakes.append((X[i].cpu(), int(y[i]), int(found[i])))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        title = ""
        if self.confusion is not None:
            with errors_as_warnings("confusion.png"):
                counts = self.confusion.compute().cpu()  # rows are true classes
                title = f"{counts.sum() - counts.trace()} mistakes in {counts.sum()} images"
                size = 2.5 + 0.6 * len(counts)
                figure = Figure(figsize=(size, size), layout="constrained")
                axes = figure.add_subplot()
                self.confusion.plot(counts, ax=axes, labels=self.names, cmap="Blues")
                axes.tick_params("x", rotation=90)
                axes.tick_params("y", rotation=0)
                save_picture(trainer, figure, "confusion.png")
        if self.mistakes and trainer.is_global_zero:
            with errors_as_warnings("predictions.png"):
                figure = plot_mistakes(self.mistakes, self.names)
                figure.suptitle(title)
                save_picture(trainer, figure, "predictions.png")


def plot_mistakes(mistakes: list[tuple[Tensor, int, int]], names: list[str]) -> Figure:
    """Images (1 or 3, H, W) in rows of eight, with predictions and labels."""
    X = torch.stack([image for image, *_ in mistakes]).float()
    if X.min() < 0 or X.max() > 1:  # as after `Normalize`; rescale all images together
        low, high = X.amin((0, 2, 3), keepdim=True), X.amax((0, 2, 3), keepdim=True)
        X = (X - low) / (high - low).clamp(min=1e-9)
    num_rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 2 * num_rows), layout="constrained")
    for i, (image, (_, label, found)) in enumerate(zip(X, mistakes)):
        axes = figure.add_subplot(num_rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
        axes.set_title(f"{names[found]}\n(is: {names[label]})", fontsize=9)
    return figure


def label_names(trainer: Any, num_classes: int) -> list[str]:
    """The data module's `classes`; numbers if missing or of a different count."""
    names: Any = getattr(trainer.datamodule, "classes", None)
    return [*map(str, names if sized_len(names) == num_classes else range(num_classes))]
