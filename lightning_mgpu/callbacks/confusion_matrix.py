"""Which classes are taken for which, over the whole test set."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.utilities.plot import plot_confusion_matrix
from typing_extensions import override

from lightning_mgpu.callbacks.pictures import class_names, logits_and_labels, save_picture


class ConfusionMatrix(Callback):
    """Counts test images by class and prediction and draws them as `confusion.png`.

    Needs batches (X, y) of one class index a sample and a `test_step` that returns a dict with `logits` (N, C); other
    models get no picture.
    """

    def __init__(self) -> None:
        self._metric: MulticlassConfusionMatrix | None = None

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._metric = None

    @override
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        if found := logits_and_labels(outputs, batch):
            logits, y = found
            if self._metric is None:  # -100 is cross-entropy's 'no class'
                metric = MulticlassConfusionMatrix(logits.shape[1], ignore_index=-100, validate_args=False)
                self._metric = metric.to(logits.device)
            self._metric.update(logits, y)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._metric is not None:
            counts = self._metric.compute().cpu()  # (C, C), rows are true classes, summed over all processes
            save_picture(trainer, draw(counts, class_names(trainer, len(counts))), "confusion.png")


def draw(counts: Tensor, names: list[str]) -> Figure:
    """torchmetrics' picture of the matrix, with the share of right answers of every class in its name."""
    figure = Figure(figsize=(3 + 0.6 * len(names), 2 + 0.6 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    right = counts.diag() / counts.sum(1).clamp(min=1)
    plot_confusion_matrix(counts, ax=axes, labels=names, cmap="Blues")
    axes.set_yticklabels([f"{name} {share:.0%}" for name, share in zip(names, right.tolist())], rotation=0)
    return figure
