"""Checkpoint files are checked before they are used: a Trainer's, without code. They know their model."""

import pickle
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.runs.errors import UsageError

LAST = "last.ckpt"
KEY = "lightning_mgpu"  # under which a checkpoint has what this package adds to Lightning's
SECTIONS = ("seed_everything", "model", "data")  # of the configuration, in every checkpoint


def read_checkpoint(path: str | Path, to_train_on: bool = False) -> dict[str, Any]:
    """What is in a checkpoint: tensors and plain values, never code (`weights_only=True`)."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; the checkpoints of a run are in its checkpoints/ directory")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} cannot be read: it is damaged, or it holds objects of classes; only tensors and plain values are "
            "read, never code"
        ) from error
    except Exception as error:  # whatever the zip reader and the unpickler make of noise
        raise UsageError(f"{path} cannot be read: it is damaged, or no checkpoint of a Trainer") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UsageError(f"{path} is no checkpoint of a Trainer: it has no state_dict")
    if to_train_on and not {"loops", "optimizer_states"} <= checkpoint.keys():
        raise UsageError(f"{path} holds weights alone: no training can go on from it")
    return checkpoint


def saved_config(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The configuration of model, data and seed in a checkpoint; empty where another program has made it."""
    return dict(checkpoint.get(KEY, {}).get("config", {}))
