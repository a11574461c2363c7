"""Predictions as a table in the order of the dataset."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mgpu.callbacks.pictures import label_names
from lightning_mgpu.tools import replacing

Table = dict[str, list[Any]]  # a column for every name; `index` is that in the dataset


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv`: a sample's index in the dataset, and what `predict_step` returned.

    That is a tensor (N,) or (N, C) with one row per sample, or a dict of such tensors. For anything
    else, nothing is written, with a warning. A sample that several processes predict has one row.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        table = make_table(trainer, predictions, batch_indices)
        tables: list[Table | None] = [table] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(tables, table)
        if None in tables:
            rank_zero_warn(
                "predictions.csv is not written: it needs one DataLoader with a batch_size, and a "
                f"{type(pl_module).__name__}.predict_step that returns a tensor, or a dict of "
                "tensors, with a row for every sample."
            )
        elif trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rows = {row[0]: row for table in tables if table for row in zip(*table.values())}
            path = Path(trainer.default_root_dir, "predictions.csv")
            with replacing(path) as part, part.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(table or ())
                writer.writerows(rows[index] for index in sorted(rows))
            print(f"predictions: {path}")


def make_table(
    trainer: Trainer, predictions: Sequence[Any], batch_indices: Sequence[Any]
) -> Table | None:
    """The samples of this process; `None` if the predictions are not a table."""
    try:
        loader: Any = trainer.predict_dataloaders
        sampler = getattr(loader[0] if isinstance(loader, list) else loader, "sampler", None)
        # the record of `batch_loader`, or Lightning's of a DataLoader's batch sampler
        indices = getattr(sampler, "seen_batch_indices", None) or batch_indices[0]
        batches = [each if isinstance(each, dict) else {"prediction": each} for each in predictions]
        table: Table = {"index": [i for batch in indices[: len(batches)] for i in batch]}
        for key in batches[0]:
            values = torch.cat([batch[key].cpu() for batch in batches])
            names, columns = [key], [values]
            if values.ndim == 2:
                prefix = "p" if key == "probabilities" else key
                labels = label_names(trainer, values.shape[1])
                names, columns = [f"{prefix}({label})" for label in labels], [*values.T]
            table |= {name: column.tolist() for name, column in zip(names, columns)}
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return table if len({len(column) for column in table.values()}) == 1 else None
