"""What can be seen to be wrong before anything starts: secrets, directories, devices."""

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_mgpu.cli.suggest import class_names, did_you_mean
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.flatten import flatten
from lightning_mgpu.runs.redact import HIDDEN

MOST_CPU_DEVICES = 16  # more than there are cores are for trying things out


def find_strategy(name: str, option: str = "--trainer.strategy=") -> str | type[Strategy]:
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
    if isinstance(found, type) and issubclass(found, Strategy):
        return found
    shown = [known for known in names if not ("find_unused" in known or "stage_" in known)]  # variants of others
    near = did_you_mean(class_name.lower(), names) if not module else did_you_mean(class_name, class_names(Strategy))
    raise UsageError(f"{option}{name}: no such strategy, {near}\nregistered are {', '.join(shown)}")


def check_secrets(config: Namespace) -> None:
    """Hold a configuration that was saved to what it was: secrets were left out of it.

    Raises:
        UsageError: If one of them is not given again.
    """
    for key, value in flatten(config.as_dict()).items():
        if isinstance(value, str) and HIDDEN in value and not key.startswith("wandb."):  # notes are words
            raise UsageError(f"--{key}={value}: a secret, which is written to no file; give it on the command line")


def check_dirpath(config: Namespace) -> None:
    """Look where a new run is told to save its checkpoints.

    Raises:
        UsageError: If those of another run are there, or the place is no local directory.
    """
    dirpath = config.dirpath
    if dirpath and "://" in dirpath and config.save_last:
        raise UsageError(
            f"--checkpoint.dirpath={dirpath}: last.ckpt, from which a run goes on, is kept in local directories: take "
            "one, or add --checkpoint.save_last=false"
        )
    if dirpath and any(Path(dirpath).glob("*.ckpt")):
        raise UsageError(
            f"--checkpoint.dirpath={dirpath} holds checkpoints of another run, which would be overwritten: name a new "
            "directory, or leave it out"
        )


def check_devices(config: Namespace) -> None:
    """Compare `--trainer.accelerator` and `--trainer.devices` with what is here.

    Raises:
        UsageError: For a kind of device that is not here, a number that is none, or one larger than what is here.
    """
    accelerator, devices = config.accelerator, config.devices
    num_gpus = torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and num_gpus == 0 and not torch.backends.mps.is_available():
        raise UsageError(f"--trainer.accelerator={accelerator}: no GPU is found here; take cpu or auto")
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and num_gpus == 0 and not torch.backends.mps.is_available())
    most = max(MOST_CPU_DEVICES, os.cpu_count() or 1) if on_cpu else num_gpus or 1
    what = f"a number of processes from 1 to {most}" if on_cpu else f"a number from 1 to {most}, a list, or -1 for all"
    wrong = UsageError(f"--trainer.devices={devices}: take {what}, or auto")
    if isinstance(devices, int):
        if not 1 <= devices <= most and not (devices == -1 and not on_cpu):
            raise wrong
    elif devices != "auto" and on_cpu:
        raise wrong
