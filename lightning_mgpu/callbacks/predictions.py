"""What `predict` found, as a table in the order of the dataset."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.classes import class_names
from lightning_mgpu.callbacks.gather import gather_lists
from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.files import replacing

COLUMNS = ("label", "prediction", "probabilities")  # what `predict_step` returns of a batch: (N,), (N,), (N, C)


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
        tables = gather_lists(own)
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
