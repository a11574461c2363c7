"""What is drawn of a classifier's test: a confusion matrix and the first images."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix
from typing_extensions import override

from lightning_mgpu.files import replacing
from lightning_mgpu.runs.directory import run_directory

NUM_IMAGES = 24  # in rows of eight
MOST_CLASSES = 50  # of a matrix that can be read
NO_CLASS = -100  # the label that torch's losses ignore


class Pictures(Callback):
    """Draws what samples are taken for (`confusion.png`), the first images (`predictions.png`).

    Needs batches (X, y) of one class index a sample, where -100 is none, and a `test_step` that
    returns a dict with `logits` (N, C); others get no picture, and more than 50 classes no matrix.
    Images (N, C, H, W) are grey or RGB.
    """

    edits_nothing = True  # see strategies/hooks.py

    def __init__(self) -> None:
        self._metric: MulticlassConfusionMatrix | None = None

    @override
    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._metric = None

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *args: Any,
    ) -> None:
        match outputs, batch:
            case {"logits": Tensor(ndim=2) as logits}, [
                Tensor() as X,
                Tensor(ndim=1, dtype=torch.int64) as y,
            ]:
                pass
            case _:
                return  # another kind of model
        num_classes = logits.shape[1]
        if self._metric is None and num_classes <= MOST_CLASSES:
            self._metric = MulticlassConfusionMatrix(
                num_classes, ignore_index=NO_CLASS, validate_args=False
            ).to(logits.device)
        if self._metric is not None:
            with ending_no_run("confusion.png"):
                self._metric.update(logits.detach(), y)
        if batch_idx == 0 and X.ndim == 4 and X.shape[1] in (1, 3) and trainer.is_global_zero:
            with ending_no_run("predictions.png"):
                X, y, classes = (tensor[:NUM_IMAGES].cpu() for tensor in (X, y, logits.argmax(1)))
                grid = draw_grid(X, y, classes, class_names(trainer, num_classes))
                save_picture(trainer, grid, "predictions.png")

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._metric is None:
            return
        with ending_no_run("confusion.png"):
            # (C, C), rows are true classes, summed over all processes
            counts = self._metric.compute().cpu()
            size = 3 + 0.6 * len(counts)
            figure = Figure(figsize=(size, size - 1), layout="constrained")
            labels = class_names(trainer, len(counts))
            self._metric.plot(counts, ax=figure.add_subplot(), labels=labels, cmap="Blues")
            save_picture(trainer, figure, "confusion.png")


@contextmanager
def ending_no_run(filename: str) -> Iterator[None]:
    """Around what makes a picture: whatever is wrong with it is a warning."""
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{filename} is not right: {type(error).__name__}: {error}")


def draw_grid(X: Tensor, y: Tensor, predictions: Tensor, names: list[str]) -> Figure:
    rows = -(-len(X) // 8)
    figure = Figure(figsize=(12, 1.9 * rows), layout="constrained")
    for i, (image, label, prediction) in enumerate(zip(X, y.tolist(), predictions.tolist())):
        axes = figure.add_subplot(rows, 8, i + 1)
        axes.imshow(image.permute(1, 2, 0).float().numpy(), cmap="gray")
        axes.set_axis_off()
        if label in (prediction, NO_CLASS):
            axes.set_title(names[prediction], fontsize=9)
        else:
            axes.set_title(f"{names[prediction]}\n(is: {names[label]})", fontsize=9, color="red")
    return figure


def save_picture(trainer: Trainer, figure: Figure, filename: str, upload: bool = True) -> None:
    """Write a picture to the run directory and show it in Weights & Biases."""
    if (directory := run_directory(trainer)) is None:
        return
    path = directory / filename
    with replacing(path) as part:
        figure.savefig(part, dpi=110)
    for logger in trainer.loggers if upload else []:
        if isinstance(logger, WandbLogger):
            logger.log_image(path.stem, [str(path)])


def class_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The dataset's; numbers where it has none, or the model has more outputs than classes."""
    names = [str(name) for name in getattr(trainer.datamodule, "classes", None) or ()]  # type: ignore[attr-defined]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]
