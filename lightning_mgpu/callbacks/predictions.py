"""Predicted classes as a picture (after `test`) and as a table (after `predict`)."""

import csv
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.run_directory import run_directory
from lightning_mgpu.tracking.in_time import in_time


class PredictionGrid(Callback):
    """Shows the first test images with label and prediction, wrong ones in red, as `predictions.png`; W&B gets a table.

    Needs image batches (X, y) and a `test_step` that returns a dict with `logits`; other models get no picture.

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
        if batch_idx == 0 and isinstance(outputs, dict) and "logits" in outputs:
            most = max(self.num_images, self.num_rows)
            X, y = (tensor[:most].cpu() for tensor in batch)
            self._shown = X, y, outputs["logits"][:most].float().softmax(dim=1).cpu()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        directory = run_directory(trainer)
        if directory is None or self._shown is None:
            return
        classes = getattr(trainer.datamodule, "classes", None) or range(self._shown[-1].shape[1])  # type: ignore[attr-defined]
        path = directory / "predictions.png"
        X, y, probabilities = (tensor[: self.num_images] for tensor in self._shown)
        self._draw(X, y, probabilities, classes).savefig(path, dpi=100)
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

    Needs a `predict_step` that returns a dict of `label`, `prediction` and `probabilities`.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        if not predictions or not isinstance(predictions[0], dict) or "probabilities" not in predictions[0]:
            raise ValueError(
                f"predict needs a {type(pl_module).__name__}.predict_step that returns a dict of label, prediction and "
                "probabilities to write predictions.csv."
            )
        # the share of process r in every batch is the r-th slice (see data/batches.py): interleave them again
        shares = gather_objects([{key: value.cpu() for key, value in batch.items()} for batch in predictions])
        batches = [batch for batch_shares in zip(*shares) for batch in batch_shares]
        if directory := run_directory(trainer):
            path = directory / "predictions.csv"
            self._write(path, batches, getattr(trainer.datamodule, "classes", None))  # type: ignore[attr-defined]
            print(f"predictions: {path}")

    def _write(self, path: Path, batches: list[dict[str, Tensor]], classes: Sequence[str] | None) -> None:
        columns = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        names = classes or range(columns["probabilities"].shape[1])
        part = path.with_name(f".{path.name}")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["index", "label", "prediction", *(f"p({name})" for name in names)])
            rows = zip(*(columns[key].tolist() for key in ("label", "prediction", "probabilities")))
            for index, (label, prediction, probabilities) in enumerate(rows):
                writer.writerow([index, label, prediction, *(f"{p:.6f}" for p in probabilities)])
        os.replace(part, path)


def gather_objects(value: list) -> list[list]:
    """The lists of all processes, in order of rank; every process has to call it."""
    if not torch.distributed.is_initialized():
        return [value]
    gathered: list[list] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, value)
    return gathered
