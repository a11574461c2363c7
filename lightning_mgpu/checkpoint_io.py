"""Checkpoint files that are whole or not there: written aside, synced to disk, then renamed; checked before use.

`last.ckpt` is what a run goes on from, `previous.ckpt` the one before it, should the first be damaged after all.
"""

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import strip_protocol  # type: ignore[import-untyped]
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replacing

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
KEY = "lightning_mgpu"  # where a checkpoint has what this package adds to Lightning's


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints atomically and loads plain types and tensors only (`weights_only=True`).

    Lightning's own renames too, but does not wait for the disk, and keeps the whole file in memory meanwhile.
    The first one is read back, to warn early of what could not be.
    """

    _tried = False

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if not is_local(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(strip_protocol(path))  # of file:///...
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path, sync=True) as part, part.open("wb") as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # a full disk, of which torch's zip writer says 'unexpected pos'
            raise
        if not self._tried:
            self._tried = True
            try:
                read_plain(path)
            except UsageError as error:
                rank_zero_warn(str(error))

    @override
    def load_checkpoint(
        self, path: Any, map_location: Callable | None = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_local(path) or not Path(path).is_file():
            return super().load_checkpoint(path, map_location, weights_only)
        return torch.load(path, map_location=map_location, weights_only=weights_only is not False)


def best_there_is(checkpoint: ModelCheckpoint) -> str | None:
    """The best checkpoint of a run, else the last one.

    A kill between a new best one and `last.ckpt` leaves the callback naming the old one, which is gone.
    """
    best = checkpoint.best_model_path
    if best and not get_filesystem(best).exists(best):
        rank_zero_warn(f"{best}, the best checkpoint, is gone: the last one stands in.")
        best = ""
    return best or checkpoint.last_model_path or None


def keep_previous(path: Path) -> None:
    """Keep a checkpoint about to be written anew as `previous.ckpt`; it is never missing meanwhile."""
    if path.is_file():
        with replacing(path.with_name(PREVIOUS)) as part:
            part.unlink(missing_ok=True)
            try:
                os.link(path, part)
            except OSError:  # a file system without hard links
                shutil.copy(path, part)


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """The contents of a checkpoint, None if the file is cut short or altered: every part's checksum is compared.

    Raises:
        UsageError: If it is whole, but holds an object of some class.
    """
    try:
        checkpoint = read_plain(path)
    except UsageError:
        raise
    except Exception:  # whatever the zip reader and the unpickler make of noise
        return None
    return checkpoint if isinstance(checkpoint, dict) and "state_dict" in checkpoint else None


def read_plain(path: str | Path) -> Any:
    """What is in a file of `torch.save`'s: tensors and plain values.

    Raises:
        UsageError: If the file is whole, but holds an object of some class.
        Exception: Of many kinds, if it is damaged.
    """
    check_sums(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if not found or not zipfile.is_zipfile(path):
            raise
        raise UsageError(
            f"{path} cannot be read: it holds a {found[1]}, and only tensors and plain values are read, never "
            "code: change the on_save_checkpoint, state_dict or hyperparameter it comes from"
        ) from error


def check_sums(path: str | Path) -> None:
    """Compare a checkpoint's tensors with the CRC-32 that `torch.save` writes of each, and `torch.load` never reads.

    Raises:
        BadZipFile: If one differs, or the archive is torn. A file that is none (torch's before 1.6) has no sums.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"{damaged} is not what was saved")
