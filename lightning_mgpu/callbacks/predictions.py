"""Predictions as a table in the order of the dataset."""

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks.figures import label_names
from lightning_mgpu.data.batches import GlobalBatchSampler
from lightning_mgpu.files import replacing
from lightning_mgpu.runs.directory import make_run_dir_on_rank_zero

Table = tuple[list[str], list[np.ndarray]]
"""Names and columns (N,); the first column has the samples' indices."""


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv`: a sample's index in the dataset, and what `predict_step` returned.

    That is a tensor (N,) or (N, C) with one row per sample, or a dict of such tensors. For anything
    else, nothing is written, with a warning. A sample that several processes predict has one row.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    @override
    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        tables = all_gather(make_table(predictions, trainer))
        if any(table is None for table in tables):
            rank_zero_warn(
                "predictions.csv is not written: it needs one loader that says which samples are "
                "in a batch, as a DataLoader with a batch_size does, and a "
                f"{type(pl_module).__name__}.predict_step that returns a tensor, or a dict of "
                "tensors, with a row for every sample."
            )
        elif directory := make_run_dir_on_rank_zero(trainer):
            columns = [np.concatenate(column) for column in zip(*(table[1] for table in tables))]
            _, order = np.unique(columns[0], return_index=True)  # sorted, each index once
            path = directory / "predictions.csv"
            with replacing(path) as temporary_path, temporary_path.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(tables[0][0])
                rows = zip(*(column[order] for column in columns))
                writer.writerows(map(format_number, row) for row in rows)
            print(f"predictions: {path}")


def make_table(predictions: Sequence[Any], trainer: Trainer) -> Table | None:
    """The samples of this process; `None` if the predictions are not a table."""
    names = ["index"]
    try:
        batches = [each if isinstance(each, dict) else {"prediction": each} for each in predictions]
        columns = [np.concatenate(sample_indices(trainer)[: len(batches)])]
        for key in batches[0]:
            values = np.concatenate([to_numpy(batch[key]) for batch in batches])
            if values.ndim == 2:
                prefix = "p" if key == "probabilities" else key
                names += [f"{prefix}({label})" for label in label_names(trainer, values.shape[1])]
                columns += [*values.T]
            else:
                names.append(key)
                columns.append(values)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return (names, columns) if len({column.shape for column in columns}) == 1 else None


def sample_indices(trainer: Trainer) -> list[list[int]]:
    """The dataset's indices of this process's samples, per batch; [] if the loader tells none."""
    loader = trainer.predict_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatchSampler):
        return [indices.tolist() for _, indices in sampler]
    # Lightning's record of a DataLoader's batch sampler
    return trainer.predict_loop.epoch_batch_indices[0]


def to_numpy(values: Tensor) -> np.ndarray:
    """In their own precision, as far as numpy has it; booleans are 0 and 1."""
    written_as = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}
    return values.detach().cpu().to(written_as.get(values.dtype, values.dtype)).numpy()


def format_number(number: np.number) -> str:
    """An integer whole; a float with as many digits as tell it from others of its precision."""
    value = float(str(number)) if isinstance(number, np.floating) else number
    return str(value).removesuffix(".0")


def all_gather(value: Any) -> list[Any]:
    """The values of all processes, by rank; every process must call it."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
