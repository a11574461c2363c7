"""What can be seen to be wrong before anything starts: strategy, devices, checkpoint, a batch nobody can share out."""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mgpu.errors import UsageError
from lightning_mgpu.explain import class_names, did_you_mean, subclasses


def find_strategy(name: str) -> str | type[Strategy]:
    """A registered name as it is, the name or dotted path of a Strategy class as the class.

    Raises:
        UsageError: If it is neither, with the names there are.
    """
    names = ["auto", *StrategyRegistry.available_strategies()]
    if name.lower() in names:
        return name
    module, _, class_name = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module or "lightning.pytorch.strategies"), class_name, None)
    except ImportError:
        found = None
    found = found or {strategy.__name__: strategy for strategy in subclasses(Strategy)}.get(name)
    if isinstance(found, type) and issubclass(found, Strategy):
        return found
    shown = [known for known in names if not re.search("find_unused|stage_", known)]  # variants of others
    near = did_you_mean(name.lower(), names) or did_you_mean(class_name, class_names(Strategy))
    raise UsageError(f"--trainer.strategy={name}: no such strategy{near}; registered are {', '.join(shown)}")


def check_devices(config: Namespace) -> None:
    """Compare `--trainer.accelerator` and `--trainer.devices` with what is here.

    Raises:
        UsageError: For a kind of device that is not here, a number that is none, or one larger than the GPUs here.
    """
    accelerator, devices = config.accelerator, config.devices
    num_gpus = torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and num_gpus == 0 and not torch.backends.mps.is_available():
        raise UsageError(f"--trainer.accelerator={accelerator}: no GPU is found here; take cpu or auto")
    on_gpus = accelerator in ("gpu", "cuda") or (accelerator == "auto" and num_gpus > 0)
    allowed = f"a number from 1 (here are {num_gpus} GPUs), " if on_gpus else "a number of processes from 1, "
    error = UsageError(f"--trainer.devices={devices}: take {allowed}{'a list of GPUs, -1 for all, ' * on_gpus}or auto")
    if isinstance(devices, str) and devices != "auto":
        try:
            indices = [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            raise error from None
        devices = indices if "," in devices else indices[0] if indices else 0
    if isinstance(devices, list):
        if not devices or not all(isinstance(i, int) and i >= 0 for i in devices) or not on_gpus:
            raise error
    elif isinstance(devices, int) and (devices < -1 or devices == 0 or (devices == -1 and not on_gpus)):
        raise error
    wanted = devices if isinstance(devices, list) else list(range(devices)) if isinstance(devices, int) else []
    if on_gpus and wanted and torch.cuda.is_available() and max(wanted) >= num_gpus:
        raise error


def check_checkpoint(path: str | None, model: str | None) -> None:
    """Look into the checkpoint: is it one, and is it of the class of model that was asked for.

    Args:
        path: As given; what Lightning itself resolves (`best`, `last`, a URL) is left alone.
        model: Dotted path of the model's class, None where nobody asked for one.

    Raises:
        UsageError: If the file is not there, not readable, no checkpoint, or of another class.
    """
    if path is None or path in ("best", "last", "hpc", "registry") or "://" in path:
        return
    if not Path(path).is_file():
        raise UsageError(f"--ckpt_path={path}: no such file; a run's are in its checkpoints/ directory")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"--ckpt_path={path} cannot be read: it is damaged, or no checkpoint of a Trainer's"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UsageError(f"--ckpt_path={path} is no checkpoint of a Trainer's: it has no state_dict")
    saved = checkpoint.get("hyper_parameters", {}).get("_class_path", model)
    if model is not None and saved.rpartition(".")[2] != model.rpartition(".")[2]:
        saved, asked = saved.rpartition(".")[2], model.rpartition(".")[2]
        raise UsageError(
            f"--ckpt_path={path} is of {saved}, not of {asked}: take --model={saved}, or leave --model out"
        )


def check_shares(trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Compare the global batch with the number of processes, before these are started.

    Raises:
        UsageError: If some process would get no sample.
    """
    batch_size = getattr(datamodule, "batch_size", None)
    if isinstance(batch_size, int) and batch_size < trainer.world_size:
        raise UsageError(
            f"--data.batch_size={batch_size}: a global batch of {batch_size} cannot be shared by {trainer.world_size} "
            f"processes; take at least {trainer.world_size}, or fewer --trainer.devices"
        )
