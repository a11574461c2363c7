"""Which classes are taken for which, over the whole test set: a picture, and a chart in Weights & Biases."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchmetrics.utilities.plot import plot_confusion_matrix
from typing_extensions import override

from lightning_mgpu.callbacks.classes import class_names, logits_and_labels
from lightning_mgpu.callbacks.gather import gather_lists
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing
from lightning_mgpu.runs.in_time import in_time


class ConfusionMatrix(Callback):
    """Counts test images by class and prediction and draws them as `confusion.png`.

    Needs batches (X, y) of one class index a sample and a `test_step` that returns a dict with `logits` (N, C); other
    models get no picture. `counts` (C, C), rows are true classes, is the sum over all processes once `test` has ended.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counts = None

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
        if found := logits_and_labels(outputs, batch):
            logits, y = found
            options: dict[str, Any] = {"ignore_index": -100, "validate_args": False}  # -100: cross-entropy's
            counts = multiclass_confusion_matrix(logits.detach(), y, logits.shape[1], **options)
            self.counts = counts if self.counts is None else self.counts + counts

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = gather_lists([] if self.counts is None else [self.counts.cpu()])
        if not parts:
            return
        self.counts = torch.stack(parts).sum(0)
        if directory := run_directory(trainer):
            names = class_names(trainer, len(self.counts))
            path = directory / "confusion.png"
            with replacing(path) as part:
                draw(self.counts, names).savefig(part, dpi=100, format="png")
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_image("confusion", [str(path)])
                    metrics: dict[str, Any] = {"confusion_matrix": chart(self.counts, names)}
                    in_time("the confusion matrix", partial(logger.log_metrics, metrics))


def draw(counts: Tensor, names: list[str]) -> Figure:
    """The matrix as a picture, with the share of right answers of every class in its name."""
    figure = Figure(figsize=(3 + 0.6 * len(names), 2 + 0.6 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    plot_confusion_matrix(counts, ax=axes, labels=names, cmap="Blues")
    right = counts.diag() / counts.sum(1).clamp(min=1)
    axes.set_yticklabels([f"{name} {share:.0%}" for name, share in zip(names, right.tolist())], rotation=0)
    axes.set_xticklabels(names, rotation=45, ha="right")
    for text in axes.texts:
        text.set_fontsize(9)
    return figure


def chart(counts: Tensor, names: list[str]) -> Any:
    """W&B's own confusion matrix, from counts; `wandb.plot.confusion_matrix` wants every sample."""
    import wandb

    rows = [[names[i], names[j], int(n)] for i, row in enumerate(counts.tolist()) for j, n in enumerate(row)]
    fields = {"Actual": "Actual", "Predicted": "Predicted", "nPredictions": "nPredictions"}
    table = wandb.Table(columns=list(fields), data=rows)
    return wandb.plot_table("wandb/confusion_matrix/v1", table, fields, {"title": "Confusion matrix of the test set"})
