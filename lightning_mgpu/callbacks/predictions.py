"""What `predict` found, as a table in the order of the dataset."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.pictures import class_names
from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing

Table = dict[str, Tensor]
"""Columns by name: a vector (N,), or a matrix (N, C) for C columns."""


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` in dataset order: the sample's index, and all that `predict_step` returned of it.

    That is a tensor with a row a sample, or a dict of such tensors. A sample that several processes have predicted has
    one row. Other returns are not written, with a warning.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        tables = gather_lists([table_of(predictions, sample_indices(trainer))] if predictions else [])
        if not tables or None in tables:
            rank_zero_warn(
                f"predictions.csv is not written: it needs one loader that says which samples are in a batch, as a "
                f"DataLoader with a batch_size does, and a {type(pl_module).__name__}.predict_step that returns a "
                "tensor, or a dict of tensors, with a row for every sample."
            )
        elif directory := run_directory(trainer):
            write(path := directory / "predictions.csv", tables, trainer)
            print(f"predictions: {path}")


def table_of(batches: Sequence[Any], indices: list[list[Any]]) -> Table | None:
    """All batches as one, with every row's `index`; `None` if they are no tables, or the indices are not known."""
    tables = [batch if isinstance(batch, dict) else {"prediction": batch} for batch in batches]
    is_column = all(isinstance(x, Tensor) and x.ndim in (1, 2) for table in tables for x in table.values())
    if not is_column or any(table.keys() != tables[0].keys() for table in tables):
        return None
    columns = {key: torch.cat([table[key] for table in tables]).cpu() for key in tables[0]}
    rows = [int(i) for batch in indices[: len(tables)] for i in batch]
    if {len(column) for column in columns.values()} != {len(rows)}:
        return None
    return {"index": torch.tensor(rows), **columns}


def write(path: Path, tables: list[Table], trainer: Trainer) -> None:
    head: list[str] = []
    for key, column in tables[0].items():
        names = class_names(trainer, column.shape[1]) if column.ndim == 2 else []
        head += [f"{'p' if key == 'probabilities' else key}({name})" for name in names] or [key]
    rows: dict[int, list[Any]] = {}  # by index: of what several processes have predicted, one stays
    for table in tables:
        for index, *cells in zip(*(column.tolist() for column in table.values())):
            rows[index] = [x for cell in cells for x in (cell if isinstance(cell, list) else [cell])]
    with replacing(path) as part, part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for index, row in sorted(rows.items()):
            writer.writerow([index, *(f"{x:.6g}" if isinstance(x, float) else x for x in row)])


def sample_indices(trainer: Trainer) -> list[list[Any]]:
    """The dataset's indices of the samples in every batch of this process; empty if the loader does not tell them."""
    loader = trainer.predict_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatches):
        return [indices.tolist() for _, indices in sampler]
    return trainer.predict_loop.epoch_batch_indices[0]  # Lightning's record of a DataLoader's batch sampler


def gather_lists(own: list[Any]) -> list[Any]:
    """The lists of all processes as one, in order of rank; every process has to call it."""
    if not torch.distributed.is_initialized():
        return own
    gathered: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, own)
    return [item for process in gathered for item in process]
