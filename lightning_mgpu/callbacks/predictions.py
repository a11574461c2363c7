"""What `predict` found, as a table in the order of the dataset."""

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

from lightning_mgpu.callbacks.pictures import class_names
from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.directory import run_directory
from lightning_mgpu.runs.files import replacing


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` in dataset order: sample's index, and what `predict_step` returned.

    That is a tensor (N,) or (N, C) with a row a sample, or a dict of such tensors. Other returns
    are not written, with a warning. A sample that several processes have predicted has one row.
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
        batches = [
            batch if isinstance(batch, dict) else {"prediction": batch} for batch in predictions
        ]
        tables = gathered(table_of(batches, sample_indices(trainer)))
        if any(table is None for table in tables):
            rank_zero_warn(
                "predictions.csv is not written: it needs one loader that says which samples are "
                "in a batch, as a DataLoader with a batch_size does, and a "
                f"{type(pl_module).__name__}.predict_step that returns a tensor, or a dict of "
                "tensors, with a row for every sample."
            )
        elif directory := run_directory(trainer):
            table = torch.cat(tables).numpy()
            _, rows = np.unique(table[:, 0], return_index=True)  # sorted, each index once
            head = {"index": "%d", **columns(batches[0], trainer)}
            with (
                replacing(path := directory / "predictions.csv") as part,
                part.open("w", newline="") as file,
            ):
                csv.writer(file, lineterminator="\n").writerow(head)
                np.savetxt(file, table[rows], fmt=list(head.values()), delimiter=",")
            print(f"predictions: {path}")


def table_of(batches: list[dict[str, Any]], indices: list[list[int]]) -> Tensor | None:
    """A process's samples, (N, 1 + C) of float64, the index first; `None` of what is no table."""
    try:
        rows = [
            torch.column_stack(
                [torch.tensor(numbers).double(), *(batch[key].double().cpu() for key in batches[0])]
            )
            for batch, numbers in zip(batches, indices)
        ]
        return torch.cat(rows)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def columns(batch: dict[str, Tensor], trainer: Trainer) -> dict[str, str]:
    """Names and formats of a table's columns; a matrix (N, C) has C, by class."""
    found: dict[str, str] = {}
    for key, values in batch.items():
        name = "p" if key == "probabilities" else key
        names = (
            [f"{name}({each})" for each in class_names(trainer, values.shape[1])]
            if values.ndim == 2
            else [key]
        )
        found |= dict.fromkeys(names, "%.6g" if values.is_floating_point() else "%d")
    return found


def sample_indices(trainer: Trainer) -> list[list[int]]:
    """The dataset's indices of this process's samples, by batch; empty if the loader tells none."""
    loader = trainer.predict_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatches):
        return [indices.tolist() for _, indices in sampler]
    # Lightning's record of a DataLoader's batch sampler
    return trainer.predict_loop.epoch_batch_indices[0]


def gathered(own: Any) -> list[Any]:
    """What every process has, in order of rank; every process has to call it."""
    if not torch.distributed.is_initialized():
        return [own]
    of_all = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, own)
    return of_all
