"""Pictures of a classifier's test: a confusion matrix, and some images with predictions."""

from math import isinf
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix as Matrix

from lightning_mgpu.callbacks.curve import save_picture
from lightning_mgpu.tools import errors_as_warnings

IGNORED_LABEL = -100  # as in torch's losses
NUM_IMAGES, MAX_CLASSES = 24, 50  # images, spread over the test set; classes of a confusion matrix


class TestPictures(Callback):
    """Draws a confusion matrix (`confusion.png`) and some test images (`predictions.png`).

    Needs batches (X, y) with labels y (N,), where -100 is ignored, and a `test_step` that returns
    a dict with `logits` (N, C). Images X (N, 1 or 3, H, W) are drawn. Others get no picture.
    """

    __test__ = False  # pytest takes a class named Test... for tests
    confusion: Matrix | None = None
    images: list[tuple[Tensor, ...]]  # with labels and predictions

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        match outputs, batch, dataloader_idx:
            case {"logits": Tensor(ndim=2) as logits}, [Tensor() as X, Tensor(ndim=1) as y], 0:
                pass
            case _:
                return  # another kind of model
        self.names = names = label_names(trainer, logits.shape[1])
        with errors_as_warnings("confusion.png"):
            if batch_idx == 0 and len(names) <= MAX_CLASSES:
                matrix = Matrix(len(names), IGNORED_LABEL, validate_args=False)
                self.confusion = matrix.to(logits.device)
            if self.confusion is not None:
                self.confusion.update(logits.detach(), y)
        if batch_idx == 0:
            self.images = []
        if X.ndim == 4 and X.shape[1] in (1, 3) and trainer.is_global_zero:
            num_batches = 1 if isinf(n := trainer.num_test_batches[0]) else n
            count = sum(i * num_batches // NUM_IMAGES == batch_idx for i in range(NUM_IMAGES))
            # the set may be sorted by class, or have its classes in turn
            generator = torch.Generator().manual_seed(batch_idx)
            at = torch.randperm(len(X), generator=generator)[:count].to(X.device)
            self.images += zip(*(t[at].cpu() for t in (X, y, logits.argmax(1))))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if images := self.__dict__.pop("images", None):
            with errors_as_warnings("predictions.png"):
                X, y, found = map(torch.stack, zip(*images))
                save_picture(trainer, plot_predictions(X, y, found, self.names), "predictions.png")
        if self.confusion is None:
            return
        with errors_as_warnings("confusion.png"):
            # (C, C), rows are true classes, summed over all processes
            counts = self.confusion.compute().cpu()
            size = 3 + 0.6 * len(counts)
            figure = Figure(figsize=(size, size - 1), layout="constrained")
            self.confusion.plot(counts, ax=figure.add_subplot(), labels=self.names, cmap="Blues")
            if trainer.is_global_zero:
                save_picture(trainer, figure, "confusion.png")


def plot_predictions(X: Tensor, y: Tensor, predictions: Tensor, names: list[str]) -> Figure:
    """Images (N, 1 or 3, H, W) in rows of eight under their predictions; mistakes are red."""
    num_rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 2 * num_rows), layout="constrained")
    for i, (image, label, prediction) in enumerate(zip(X, y.tolist(), predictions.tolist())):
        axes = figure.add_subplot(num_rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).float().numpy(), cmap="gray")
        axes.set_axis_off()
        is_right = label in (prediction, IGNORED_LABEL)
        title = names[prediction] + ("" if is_right else f"\n(is: {names[label]})")
        axes.set_title(title, fontsize=9, color="black" if is_right else "red")
    return figure


def label_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The data module's `classes`; numbers if there are none, or another number of them."""
    names = [str(name) for name in getattr(trainer.datamodule, "classes", ())]  # type: ignore[attr-defined]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]
