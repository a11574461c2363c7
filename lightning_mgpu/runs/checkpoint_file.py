"""Read a checkpoint with `weights_only=True`, check that a Trainer wrote it, and return the
configuration stored in it.
"""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import PACKAGE, program

LAST = "last.ckpt"
CHECKPOINT_KEY = (
    "lightning_mgpu"  # under which a checkpoint has what this package adds to Lightning's
)
SECTIONS = ("seed_everything", "model", "data")  # of the configuration, in every checkpoint
TRUSTED = (PACKAGE, "torch", "lightning")  # packages of classes, beside the project's own
DOTTED = re.compile(r"\b[^\W\d]\w*(?:\.[^\W\d]\w*)+")


def read_checkpoint(path: str | Path, to_train_on: bool = False) -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values, never code (`weights_only=True`).

    Raises:
        UsageError: If it is not there, damaged, or not a Trainer's; with `to_train_on` also if it
            holds only weights.
    """
    if not Path(path).is_file():
        raise UsageError(
            f"{path}: no such file; the checkpoints of a run are in its checkpoints/ directory"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the zip reader and the unpickler make of noise
        told = (
            "it is damaged, or it holds objects of classes; only tensors and plain values are read"
        )
        raise UsageError(f"{path} cannot be read: {told}, never code") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UsageError(f"{path} is not a checkpoint of a Trainer: it has no state_dict")
    if to_train_on and not {"loops", "optimizer_states"} <= checkpoint.keys():
        raise UsageError(f"{path} holds weights alone: no training can go on from it")
    return checkpoint


def check_readable(trainer: Trainer, path: Path) -> None:
    """Look through a checkpoint just written, in every process, as all have to end.

    Raises:
        UsageError: If it has objects, such as numpy's numbers, which are never read; says where.
    """
    if trainer.strategy.broadcast(path.is_dir()):
        raise UsageError(f"{path} is a directory of shards, and runs read checkpoints from files")
    told = ""
    if trainer.is_global_zero and path.is_file() and get_unsafe_globals_in_checkpoint(path):
        content = torch.load(path, map_location="cpu", weights_only=False)  # of this process
        for key, value in flatten(content).items():
            torch.save(value, file := BytesIO())
            file.seek(0)
            if unsafe := get_unsafe_globals_in_checkpoint(file):
                told += f"\n{key}: {', '.join(sorted(unsafe))}"
    if told := trainer.strategy.broadcast(told):
        raise UsageError(
            "checkpoints could not be read again: they may hold tensors and plain values, such as "
            f"float(x) for a number of numpy's, and these hold objects of other classes:{told}"
        )


def saved_config(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """A checkpoint's configuration of model, data and seed; empty if another program made it.

    Nothing else is taken from it, not even the directory of the data. Classes of other packages are
    printed: the author of the file chose them, and jsonargparse imports them, from the working
    directory first.
    """
    config = checkpoint.get(CHECKPOINT_KEY, {}).get("config", {})
    config = {key: config[key] for key in SECTIONS if key in config}
    if data := config.get("data"):
        config["data"] = {
            part: {key: value for key, value in data[part].items() if key != "root"}
            for part in ("init_args", "dict_kwargs")
            if part in data
        } | {"class_path": data["class_path"]}
    print_foreign(config, path)
    return config


@rank_zero_only
def print_foreign(config: dict[str, Any], path: str | Path) -> None:
    """Print what could be imported, wherever it stands; texts may be YAML with classes, too."""
    names = [
        name
        for name in dict.fromkeys(DOTTED.findall(str(config)))
        if (package := name.partition(".")[0]) not in (*TRUSTED, program())
        and (package in sys.modules or find_spec(package))
    ]
    if names:  # stdout may be the configuration, of --print_config
        told = f"{path} names classes of other files, which run when they are imported"
        print(f"{told}: {', '.join(names)}", file=sys.stderr, flush=True)


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """A nested configuration under the names of the command line, one row of a table.

    `{"model": {"class_path": "LeNet", "init_args": {"lr": 0.1}}}`
    -> `{"model": "LeNet", "model.lr": 0.1}`.

    The items of a list of mappings are numbered.
    """
    return dict(_items("", config))


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        if name == "init_args" and not item:
            continue  # a class without arguments, whose name would be overwritten
        # which no flag has in its name
        part = "" if name in ("class_path", "init_args") else f".{name}"
        yield from _items(f"{key}{part}".lstrip("."), item)
