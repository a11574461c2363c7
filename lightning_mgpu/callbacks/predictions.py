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
from lightning_mgpu.data.batches import GlobalBatchSampler
from lightning_mgpu.files import replacing
from lightning_mgpu.runs.directory import run_directory


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
            table = np.concatenate(tables)
            _, rows = np.unique(table["f0"], return_index=True)  # sorted, each index once
            with (
                replacing(path := directory / "predictions.csv") as part,
                part.open("w", newline="") as file,
            ):
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["index", *columns(batches[0], trainer)])
                writer.writerows(map(text, row) for row in table[rows])
            print(f"predictions: {path}")


def table_of(batches: list[dict[str, Any]], indices: list[list[int]]) -> np.ndarray | None:
    """A process's samples, a record (index, ...) for each; `None` where it is not a table."""
    try:
        rows = [
            np.rec.fromarrays(sum((parts(batch[key]) for key in batches[0]), [np.array(numbers)]))
            for batch, numbers in zip(batches, indices)
        ]
        return np.concatenate(rows)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def parts(values: Tensor) -> list[np.ndarray]:
    """The columns of (N,) or (N, C), in their own precision."""
    written = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}  # numpy has no bfloat16
    array = values.detach().cpu().to(written.get(values.dtype, values.dtype)).numpy()
    return list(array.T) if array.ndim == 2 else [array]


def text(number: np.number) -> str:
    """An integer whole; a float with as many digits as tell it from others of its precision."""
    whole = float(str(number)) if isinstance(number, np.floating) else number
    return str(whole).removesuffix(".0")


def columns(batch: dict[str, Tensor], trainer: Trainer) -> list[str]:
    """Names of a table's columns; a matrix (N, C) has C, by class."""
    found: list[str] = []
    for key, values in batch.items():
        name = "p" if key == "probabilities" else key
        if values.ndim == 2:
            found += [f"{name}({each})" for each in class_names(trainer, values.shape[1])]
        else:
            found.append(key)
    return found


def sample_indices(trainer: Trainer) -> list[list[int]]:
    """The dataset's indices of this process's samples, by batch; empty if the loader tells none."""
    loader = trainer.predict_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatchSampler):
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
