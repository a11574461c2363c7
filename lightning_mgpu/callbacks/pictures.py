"""Pictures of a classifier's test: a confusion matrix, and images with predictions."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix as Matrix

from lightning_mgpu.callbacks.curve import save_picture
from lightning_mgpu.tools import errors_as_warnings

IGNORED_LABEL = -100  # as in torch's losses
NUM_IMAGES, MAX_CLASSES = 24, 50  # of predictions.png; of a confusion matrix


class TestPictures(Callback):
    """Draws a confusion matrix (`confusion.png`) and test images, mistakes first.

    Needs batches (X, y), or those of a `Classifier`, with labels y (N,), where -100 is ignored,
    and a `test_step` that returns a dict with `logits` (N, C); one logit is two classes. Images X
    (N, 1 or 3, H, W) of the first process are drawn; in a dict, X is the first entry.
    """

    confusion: Matrix | None = None
    images: list[Tensor] | None = None  # keys, X, labels, predictions

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *at: int
    ) -> None:
        read: Any = getattr(pl_module, "inputs_and_target", lambda batch: batch)
        with suppress(ValueError):  # a `test_step` that overrides ours may read other batches
            batch = read(batch)
        match outputs, batch, sum(at[1:]):  # of the first loader
            case {"logits": Tensor(ndim=2) as logits}, [inputs, Tensor(ndim=1) as y], 0:
                X = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
                if logits.shape[1] == 1 and ((y == 0) | (y == 1)).all():
                    logits, y = F.pad(logits, (1, 0)), y.long()  # as in binary cross-entropy
            case _:
                return  # another kind of model
        if y.is_floating_point():
            return  # no classes
        self.names = names = label_names(trainer, logits.shape[1])
        with errors_as_warnings("confusion.png"):
            if at[0] == 0 and len(names) <= MAX_CLASSES:
                self.confusion = Matrix(len(names), IGNORED_LABEL, validate_args=False).to(y.device)
            if self.confusion is not None:
                self.confusion.update(logits.detach(), y)
        with errors_as_warnings("predictions.png"):
            if isinstance(X, Tensor) and X.ndim == 4 and X.shape[1] in (1, 3):
                # a sample of the mistakes, then one of the rest
                keys = torch.rand(len(X), generator=torch.Generator().manual_seed(at[0]))
                found = logits.argmax(1)
                keys = keys.to(X.device) + ((found == y) | (y == IGNORED_LABEL))
                new = [tensor.cpu() for tensor in smallest_keys([keys, X, y, found])]
                self.images = smallest_keys(self.images, new)

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
        if self.images is not None and trainer.is_global_zero:
            with errors_as_warnings("predictions.png"):
                _, X, y, found = self.images
                figure = plot_predictions(X, y, found, self.names)
                figure.suptitle(title)
                save_picture(trainer, figure, "predictions.png")
        self.images = None


def smallest_keys(*samples: list[Tensor] | None) -> list[Tensor]:
    """Of samples [keys (n,), ...] those with the smallest keys, in their order."""
    tensors = [torch.cat(parts) for parts in zip(*filter(None, samples))]
    at = tensors[0].argsort()[:NUM_IMAGES]
    return [tensor[at] for tensor in tensors]


def plot_predictions(X: Tensor, y: Tensor, found: Tensor, names: list[str]) -> Figure:
    """Images (N, 1 or 3, H, W) in rows of eight; wrong predictions are red."""
    X = X.float()
    if X.min() < 0 or X.max() > 1:  # as after `Normalize`; all images have one range
        low, high = X.amin((0, 2, 3), keepdim=True), X.amax((0, 2, 3), keepdim=True)
        X = (X - low) / (high - low).clamp(min=1e-9)
    num_rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 2 * num_rows), layout="constrained")
    for i, (image, label, guess) in enumerate(zip(X, y.tolist(), found.tolist())):
        axes = figure.add_subplot(num_rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set_axis_off()
        is_right = label in (guess, IGNORED_LABEL)
        title = names[guess] + ("" if is_right else f"\n(is: {names[label]})")
        axes.set_title(title, fontsize=9, color="black" if is_right else "red")
    return figure


def label_names(trainer: Any, num_classes: int) -> list[str]:
    """The data module's `classes`; numbers if it has none, or more or fewer."""
    names = getattr(trainer.datamodule, "classes", ())
    return [*map(str, names if len(names) == num_classes else range(num_classes))]
