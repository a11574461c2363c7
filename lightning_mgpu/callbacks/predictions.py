"""Predictions as a table in the order of the dataset."""

import csv
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Subset

from lightning_mgpu.callbacks.pictures import label_names
from lightning_mgpu.tools import atomic_write


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv`: the index and the prediction of every sample.

    `predict_step` must return a tensor (N,) or (N, C), or a dict of such tensors; otherwise a
    warning is printed and no file written. `samples` of the dataset, as in `ImageFolder`, and
    `classes` of the data module add columns.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self, trainer: Any, pl_module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        tables = gather_tables(trainer, make_table(trainer, predictions, batch_indices))
        if None in tables:
            rank_zero_warn(
                "predictions.csv is not written: it requires one DataLoader with a batch_size and "
                f"a {type(pl_module).__name__}.predict_step that returns tensors (N,) or (N, C)"
            )
        elif trainer.is_global_zero and not trainer.fast_dev_run:
            rows = {row[0]: row for table in tables if table for row in zip(*table.values())}
            path = Path(trainer.default_root_dir, "predictions.csv")
            with atomic_write(path) as part, part.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(tables[0] or ())
                writer.writerows(rows[index] for index in sorted(rows))
            print(f"predictions: {path}")


def gather_tables(trainer: Any, own: dict | None) -> list[dict | None]:
    """The tables of all processes."""
    if control := getattr(trainer.strategy, "control", None):  # can be interrupted by Ctrl-C
        return list(control.all_gather_objects(own, "predictions"))
    tables = [own] * trainer.world_size
    if trainer.world_size > 1:
        dist.all_gather_object(tables, own)
    return tables


def make_table(trainer: Any, predictions: Any, batch_indices: Any) -> dict[str, list] | None:
    """The columns of this process; `None` if the predictions do not form a table."""
    try:
        loaders = trainer.predict_dataloaders
        [loader, *_] = loaders if isinstance(loaders, list) else [loaders]
        # recorded by `batch_loader`, or by Lightning
        indices = getattr(loader.sampler, "seen_batch_indices", None) or batch_indices[0]
        batches = [x if isinstance(x, dict) else {"prediction": x} for x in predictions]
        at = [i for batch in indices[: len(batches)] for i in batch]
        table: dict[str, list] = {"index": at}
        data = getattr(loader.dataset, "read_from", loader.dataset)
        if isinstance(data, Subset):
            at, data = torch.as_tensor(data.indices)[at].tolist(), data.dataset
        match getattr(data, "samples", data):  # (path, label) or path
            case [Path() | (str() | Path(), *_), *_] as samples:
                chosen = [samples[i] for i in at]
                table["file"] = [x[0] if isinstance(x, tuple) else x for x in chosen]
        names: Any = getattr(trainer.datamodule, "classes", None)
        classes = dict(enumerate(names)) if sized_len(names) else {}
        for key in batches[0]:
            values = torch.cat([batch[key].cpu() for batch in batches])
            if values.ndim > 2:
                return None  # such as masks: too large for a cell
            names, columns = [key], [values.tolist()]
            if values.ndim == 2:
                prefix, digits = ("p", ".6g") if key == "probabilities" else (key, "")
                names = [f"{prefix}({x})" for x in label_names(trainer, values.shape[1])]
                columns = [[format(x, digits) for x in row] for row in values.T.tolist()]
            elif key == "prediction" and classes and values.ndim == 1:
                names.append("class")
                columns.append([classes.get(i) for i in columns[0]])
            table |= zip(names, columns)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return table if len({len(column) for column in table.values()}) == 1 else None
