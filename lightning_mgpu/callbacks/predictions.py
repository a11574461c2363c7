"""Predicted classes as a picture (after `test`) and as a table (after `predict`)."""

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.run_directory import run_directory
from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replacing
from lightning_mgpu.tracking.in_time import in_time

COLUMNS = ("label", "prediction", "probabilities")  # what `predict_step` returns of a batch: (N,), (N,), (N, C)


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


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` (index, label, prediction, probability of every class) in dataset order.

    Needs a `predict_step` that returns a dict of `label`, `prediction` and `probabilities`, a row a sample; of other
    models it writes nothing, and says so. A sample that several processes have predicted has one row.

    Raises:
        UsageError: In several processes, if the loader does not tell which samples are in a batch.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0 and trainer.world_size > 1 and _is_table(outputs) and not sample_indices(trainer):
            raise UsageError(
                f"predict in {trainer.world_size} processes must know which samples are in a batch, and this loader "
                "does not say (an IterableDataset, or no batch_size): predict with --trainer.devices=1"
            )

    @override
    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        own = [_table(predictions, sample_indices(trainer))] if predictions else []
        tables = [table for process in gather_objects(own) for table in process]
        if not tables or None in tables:
            rank_zero_warn(
                f"predictions.csv is not written: it needs one loader, and a {type(pl_module).__name__}.predict_step "
                "that returns a dict of label, prediction and probabilities, a row for every sample."
            )
        elif directory := run_directory(trainer):
            path = directory / "predictions.csv"
            self._write(path, tables, trainer)
            print(f"predictions: {path}")

    def _write(self, path: Path, tables: list[dict[str, Any]], trainer: Trainer) -> None:
        row_of = {index: row for row, index in enumerate(index for table in tables for index in table["index"])}
        order = sorted(row_of)
        rows = [row_of[index] for index in order]
        columns = {key: torch.cat([table[key] for table in tables])[rows] for key in COLUMNS}
        names = class_names(trainer, columns["probabilities"].shape[1])
        with replacing(path) as part, part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["index", "label", "prediction", *(f"p({name})" for name in names)])
            for index, label, prediction, probabilities in zip(order, *(columns[key].tolist() for key in COLUMNS)):
                writer.writerow([index, label, prediction, *(f"{p:.6f}" for p in probabilities)])


def sample_indices(trainer: Trainer) -> list[list[Any]]:
    """The dataset's indices of the samples in every batch of this process; empty if the loader does not tell them."""
    loader = trainer.predict_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatches):
        return [indices.tolist() for _, indices in sampler]
    return trainer.predict_loop.epoch_batch_indices[0]  # Lightning's record of a DataLoader's batch sampler


def _is_table(outputs: Any) -> bool:
    if not isinstance(outputs, dict) or not all(isinstance(outputs.get(key), Tensor) for key in COLUMNS):
        return False
    label, prediction, probabilities = (outputs[key] for key in COLUMNS)
    return probabilities.ndim == 2 and label.shape == prediction.shape == probabilities.shape[:1]


def _table(batches: Sequence[Any], indices: list[list[Any]]) -> dict[str, Any] | None:
    """All batches as one, with every row's `index`, counted where it is not known; `None` if they are no tables."""
    if not all(map(_is_table, batches)):
        return None
    columns: dict[str, Any] = {key: torch.cat([batch[key] for batch in batches]) for key in COLUMNS}
    sizes = [len(batch["label"]) for batch in batches]
    if not indices:
        return {**columns, "index": list(range(sum(sizes)))}
    seen = indices[: len(sizes)]
    if [len(batch) for batch in seen] != sizes:
        return None
    return {**columns, "index": [int(i) if isinstance(i, Tensor) else i for batch in seen for i in batch]}


def logits_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor] | None:
    """The `logits` (N, C) that a `test_step` returned and the batch's class indices (N,); `None` for other models."""
    if not isinstance(outputs, dict) or not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return None
    logits, y = outputs.get("logits"), batch[1]
    if not isinstance(logits, Tensor) or not isinstance(y, Tensor):
        return None
    fits = logits.ndim == 2 and y.shape == logits.shape[:1] and not y.is_floating_point()
    return (logits, y) if fits else None


def class_names(trainer: Trainer, num_classes: int) -> list[str]:
    """The dataset's; numbers where it has none, or the model has more outputs than there are classes."""
    names = [str(name) for name in getattr(trainer.datamodule, "classes", None) or ()]  # type: ignore[attr-defined]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]


def gather_objects(value: list) -> list[list]:
    """The lists of all processes, in order of rank; every process has to call it."""
    if not torch.distributed.is_initialized():
        return [value]
    gathered: list[list] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, value)
    return gathered
