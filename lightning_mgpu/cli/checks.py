"""Checks before anything starts: secrets, devices, and options that must not change."""

import os
import re
from collections.abc import Container
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_mgpu.cli.error_messages import last_part
from lightning_mgpu.errors import UsageError
from lightning_mgpu.runs.checkpoint_file import flatten

MAX_CPU_DEVICES = 16  # more than there are cores are for trying things out
SECRET_NAME = re.compile("(?i).*(password|passwd|secret|token|api_?key|credentials)")
# `start_token` and its like are words of a language model, unless the value is a long key
WORD_NAME = re.compile("(?i)(?!.*(api|auth|access|session)_?token).+_token")
KEY_VALUE = re.compile(r"[\w.~+/=-]{16,}")
# where launchers say how many processes they have started, in all and on this machine
LAUNCHERS = {
    "RANK": ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun
    "SLURM_NTASKS": ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", ""),  # Lightning needs mpi4py to see them
}
# classes of this package by their last name in earlier versions, as in the config.yaml of a run
RENAMED = {
    "Batches": "lightning_mgpu.data.batches.BatchDataset",
    "GlobalBatches": "lightning_mgpu.data.batches.GlobalBatchSampler",
    "Pictures": "lightning_mgpu.callbacks.TestPictures",
    "Samples": "lightning_mgpu.data.batches.CollatedSamples",
    "SequentialBatches": "lightning_mgpu.data.batches.SequentialBatchSampler",
}
SECRET_URL = re.compile(r"://[^\s/@:]+:[^\s/@]+@")  # https://user:password@host


def resolve_options(config: Namespace, given: Container[str]) -> None:
    """Give every option the value that it stands for, so that config.yaml says what is used.

    Raises:
        UsageError: For `--weights_only=false`.
    """
    if config.weights_only is False:
        raise UsageError("--weights_only=False: a checkpoint runs no code; leave this out")
    config.weights_only = True
    if config.no_wandb:
        config.no_wandb, config.wandb.mode = False, "disabled"
    take_launchers_numbers(config.trainer, given)


def check_options(
    config: Namespace, saved_config: dict[str, Any], pinned: dict[str, Any], source: object
) -> None:
    """What can be seen to be wrong before anything is built.

    Args:
        config: The options.
        saved_config: The same as plain values.
        pinned: Options that may have no other value, by name.
        source: The run directory or the checkpoint that has these values.
    """
    check_secrets(config)
    check_devices(config.trainer)
    refuse_changed_options(saved_config, pinned, source)


def check_trainer(trainer: Trainer) -> None:
    """What can be seen to be wrong before the Trainer runs."""
    check_processes(trainer)
    check_strategy(trainer.strategy)


def refuse_old_names(values: dict[str, Any]) -> None:
    """Refuse the names that classes of this package had earlier; `values` are options by name."""
    for key, value in values.items():
        if str(value).startswith("lightning_mgpu.") and last_part(value) in RENAMED:
            raise UsageError(f"--{key}={value}: its name is now {RENAMED[last_part(value)]}")


def check_secrets(config: Namespace) -> None:
    """Refuse secrets: `config.yaml`, checkpoints and W&B have every option."""
    for key, value in flatten(config.as_dict()).items():
        if not value or not isinstance(value, str):
            continue
        name = last_part(key)
        is_word = WORD_NAME.fullmatch(name) and not KEY_VALUE.fullmatch(value)
        if (SECRET_NAME.fullmatch(name) and not is_word) or SECRET_URL.search(value):
            raise UsageError(
                f"--{key}: a secret, and every option is written to config.yaml: hand it over in "
                "an environment variable (most loggers read one), or read it in code of your own; "
                "an argument that is none needs another name"
            )


def check_devices(config: Namespace) -> None:
    """Refuse absurd numbers of CPU devices: Lightning would start as many processes."""
    on_cpu = config.accelerator == "cpu" or not (
        torch.cuda.is_available() or torch.backends.mps.is_available()
    )
    most = max(MAX_CPU_DEVICES, os.cpu_count() or 1)
    if on_cpu and str(config.devices).isdigit() and int(config.devices) > most:
        raise UsageError(
            f"--trainer.devices={config.devices}: take a number of processes from 1 to {most}, or "
            "auto"
        )


def launched() -> tuple[int, int]:
    """The processes that a launcher has started, in all and on this machine; 0 if none says so."""
    told = next((name for name in LAUNCHERS if name in os.environ), "")
    is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if not told or (told == "SLURM_NTASKS" and is_shell):
        return 0, 0
    num, num_here = (int(os.environ.get(name, 0)) for name in LAUNCHERS[told])
    return num, num_here


def take_launchers_numbers(config: Namespace, given: Container[str]) -> None:
    """Under a launcher of several processes `auto` is `ddp` over all of them."""
    num, num_here = launched()
    if not num_here:
        return
    if "trainer.num_nodes" not in given:  # a run may resume on fewer machines
        config.num_nodes = num // num_here or 1
    if num < 2:
        return
    if config.strategy == "auto":
        config.strategy = "ddp"
    if config.devices == "auto":
        config.devices = num_here


def check_processes(trainer: Trainer) -> None:
    """Refuse to train several models, or on a part of the data, under a launcher."""
    num, num_here = launched()
    strategy: Any = trainer.strategy
    if strategy.launcher is None:
        joins = num == 1
    else:
        num_processes = getattr(strategy, "num_processes", trainer.num_devices)
        joins = num == num_processes * trainer.num_nodes
        joins &= num_here in (0, num_processes)
        joins &= isinstance(strategy.launcher, _SubprocessScriptLauncher)
        joins &= strategy.cluster_environment.creates_processes_externally
    if num and not joins:
        raise UsageError(
            f"{num} process(es) were started (torchrun, SLURM, MPI), {num_here or 'some'} of them "
            f"here, and {type(strategy).__name__} with --trainer.devices={trainer.num_devices} "
            f"--trainer.num_nodes={trainer.num_nodes} does not join them: start a single one, or "
            "leave these options and --trainer.strategy out for `ddp` over all that were started"
        )


def check_strategy(strategy: Strategy) -> None:
    """Refuse checkpoints that are directories, before an epoch is spent on one: runs read files."""
    refused = ""
    if getattr(strategy, "_state_dict_type", "full") == "sharded":  # FSDP's, and a subclass's own
        refused, allowed = ".state_dict_type=sharded", "full"
    elif getattr(strategy, "_save_distributed_checkpoint", False):
        refused, allowed = ".save_distributed_checkpoint=True", "False"
    elif isinstance(strategy, DeepSpeedStrategy):
        refused, allowed = "=deepspeed", "fsdp"
    if refused:
        raise UsageError(
            f"--trainer.strategy{refused}: a checkpoint would be a directory of "
            f"shards, which --resume, test, predict and export cannot read: take {allowed}"
        )


def refuse_changed_options(config: dict[str, Any], pinned: dict[str, Any], source: object) -> None:
    """Refuse other values of `pinned` options, by name, than those that `source` has."""
    values = flatten(config)
    for key, value in pinned.items():
        if key not in values or values[key] != value:
            raise UsageError(
                f"--{key}={values.get(key)}: {source} has {value}, which stays: leave the option "
                "out"
            )
