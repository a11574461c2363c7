"""What can be seen to be wrong before anything starts: numbers, strategy, devices, checkpoint, shares of a batch."""

import importlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fsspec.core import strip_protocol  # type: ignore[import-untyped]
from jsonargparse import Namespace
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from packaging.version import InvalidVersion, Version

from lightning_mgpu.checkpoint_io import read_plain
from lightning_mgpu.config_file import misread
from lightning_mgpu.errors import UsageError, in_one_line
from lightning_mgpu.explain import class_names, did_you_mean, subclasses
from lightning_mgpu.flatten import flatten
from lightning_mgpu.redact import HIDDEN

LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, torch.finfo(torch.float32).max  # what torch counts and computes with
LEAST = {  # of the Trainer's numbers, those it takes whatever they are: then it divides by them, or ignores them
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": -1,
}

CONTENTS: dict[str, type] = {  # of a checkpoint, as far as Lightning reads it without looking
    **dict.fromkeys(("state_dict", "hyper_parameters", "callbacks", "loops"), dict),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), list),
    **dict.fromkeys(("epoch", "global_step"), int),
    "pytorch-lightning_version": str,
}


def check_numbers(config: Namespace) -> None:
    """Hold all numbers of a configuration to what torch can compute with, and the Trainer's to what they mean.

    Raises:
        UsageError: For NaN, an infinity, a number too large, and one below the least that makes sense.
    """
    for part, expected in {"model": "the name of a class", "data": "the name of a class", "trainer": "options"}.items():
        if not isinstance(config.get(part), Namespace):
            raise UsageError(f"--{part}={config.get(part)}: expected {expected}")
    for key, value in _numbers("", config.as_dict()):
        given = f"--{key}={value}"
        if isinstance(value, float) and not abs(value) <= LARGEST_FLOAT:
            raise UsageError(
                f"{given}: expected a finite number" + f", up to {LARGEST_FLOAT:.1e}" * math.isfinite(value)
            )
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise UsageError(f"{given}: too large a number; take {LARGEST_INT} at most")
        least = LEAST.get(key.removeprefix("trainer."), value)
        if value < least:
            raise UsageError(f"{given}: take at least {least}")
    if config.trainer.val_check_interval == 0:
        raise UsageError("--trainer.val_check_interval=0: take batches from 1, or a part of an epoch above 0.0")


def check_given(args: list[str], config: Namespace) -> None:
    """Compare the values given on the command line with what YAML has made of them.

    Raises:
        UsageError: For `1:30` read as 90, `{max_epochs: 010}` as 8, and for a comment read as nothing.
    """
    for arg, following in zip(args, [*args[1:], ""]):
        name, has_value, value = arg.removeprefix("--").partition("=")
        name = name.removesuffix("+")  # appends to a list
        value = value if has_value else "" if following.startswith("--") else following
        found: Any = config
        for part in name.split("."):
            found = found.get("init_args", found) if isinstance(found, Namespace) else None
            found = found.get(part, "") if isinstance(found, Namespace) else ""
        if arg.startswith("--") and type(found) in (int, float) and ":" in value:
            raise UsageError(f"--{name}={value}: would be read as the number {found}; write it in digits")
        if arg.startswith("--") and found is None and value and not value.partition("#")[0].strip("\ufeff \t\n"):
            raise UsageError(f"--{name}={value}: would be read as null; write null, or another value")
        if arg.startswith("--") and value[:1] in ("{", "[") and not isinstance(found, str) and (why := misread(value)):
            raise UsageError(f"--{name}={value}: {why}")


def check_secrets(config: Namespace) -> None:
    """Hold a configuration that was saved to what it was: secrets were left out of it.

    Raises:
        UsageError: If one of them is not given again.
    """
    for key, value in flatten(config.as_dict()).items():
        if isinstance(value, str) and HIDDEN in value and not key.startswith("wandb."):  # notes are words
            name = key.replace("init_args.", "")
            raise UsageError(
                f"--{name}={value}: a secret, which is written to no file; give it on the command line again"
            )


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a configuration, each with the name of its option."""
    if isinstance(value, (int, float)):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(key if name == "init_args" else f"{key}.{name}".lstrip("."), part)
    elif isinstance(value, list):
        for part in value:
            yield from _numbers(key, part)


def only_weights(config: Namespace) -> None:
    """Have checkpoints read as tensors and plain values, wherever they come from: never as code.

    Raises:
        UsageError: If something else is asked for.
    """
    if "weights_only" in config:  # `fit` and its like have it
        if config.weights_only is False:
            raise UsageError("--weights_only=false: a checkpoint could run code of its own; leave it out")
        config.weights_only = True


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
    found = found or {strategy.__name__: strategy for strategy in subclasses(Strategy)}.get(name)
    if isinstance(found, type) and issubclass(found, Strategy):
        return found
    shown = [known for known in names if not re.search("find_unused|stage_", known)]  # variants of others
    near = did_you_mean(name.lower(), names) or did_you_mean(class_name, class_names(Strategy))
    raise UsageError(f"{option}{name}: no such strategy{near}; registered are {', '.join(shown)}")


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
        path: As given; `hpc` and `registry` are Lightning's to resolve, and of a URL is asked whether it is there.
        model: Dotted path of the model's class, None where nobody asked for one.

    Raises:
        UsageError: If the file is not there, not readable, no checkpoint, or of another class.
    """
    if path in ("best", "last"):
        raise UsageError(f"--ckpt_path={path}: name the file; a run's are in its checkpoints/ directory")
    if path is None or path in ("hpc", "registry"):
        return
    if "://" in path:
        _check_url(path)
        return
    if not Path(path).is_file():
        raise UsageError(f"--ckpt_path={path}: no such file; a run's are in its checkpoints/ directory")
    try:
        checkpoint = read_plain(path)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--ckpt_path={path} cannot be read: it is damaged, or no checkpoint of a Trainer's"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UsageError(f"--ckpt_path={path} is no checkpoint of a Trainer's: it has no state_dict")
    _check_contents(path, checkpoint)
    saved = checkpoint.get("hyper_parameters", {}).get("_class_path", model)
    if model is not None and saved.rpartition(".")[2] != model.rpartition(".")[2]:
        saved, asked = saved.rpartition(".")[2], model.rpartition(".")[2]
        raise UsageError(
            f"--ckpt_path={path} is of {saved}, not of {asked}: take --model={saved}, or leave --model out"
        )


def _check_url(url: str) -> None:
    try:
        is_there = get_filesystem(url).exists(url)
    except Exception as error:  # whatever the library behind the protocol raises; or there is none
        raise UsageError(f"--ckpt_path={url} cannot be read: {in_one_line(error)}") from error
    if not is_there:
        raise UsageError(f"--ckpt_path={url}: no such file, or nobody answers")


def _check_contents(path: str, checkpoint: dict[str, Any]) -> None:
    for name, kind in CONTENTS.items():
        if not isinstance(checkpoint.get(name, kind()), kind):
            raise UsageError(f"--ckpt_path={path} is no checkpoint of a Trainer's: its {name} is no {kind.__name__}")
    try:
        Version(checkpoint.get("pytorch-lightning_version", "0"))
    except InvalidVersion as error:
        raise UsageError(f"--ckpt_path={path} is no checkpoint of a Trainer's: {error}") from error
    if not isinstance(checkpoint.get("hyper_parameters", {}).get("_class_path", ""), str):
        raise UsageError(f"--ckpt_path={path} is no checkpoint of a Trainer's: it does not name its model")
    for name, tensor in checkpoint["state_dict"].items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.isnan().any():
            raise UsageError(f"--ckpt_path={path}: {name} holds NaN, its run had diverged; take an earlier checkpoint")


def check_saving(config: Namespace, subcommand: str) -> None:
    """Ask whether a new run leaves its record, and where.

    Raises:
        UsageError: If the Trainer is told to save none, or if those of another run would be overwritten.
    """
    if config.trainer.barebones:
        raise UsageError(
            "--trainer.barebones=true: not taken; it would leave out the run's log, checkpoints, curve and closing line"
        )
    if config.trainer.enable_checkpointing is False:
        none = "--checkpoint.save_last=false --checkpoint.save_top_k=0"
        raise UsageError(f"--trainer.enable_checkpointing=false: not taken; {none} saves no checkpoint")
    dirpath = config.checkpoint.dirpath
    if subcommand != "fit" or not dirpath or config.trainer.fast_dev_run or not is_local(dirpath):
        return
    if any(Path(strip_protocol(dirpath)).glob("*.ckpt")):
        raise UsageError(
            f"--checkpoint.dirpath={dirpath} holds checkpoints of another run, which would be overwritten: name a new "
            "directory, or leave it out"
        )


def check_classes(model: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Compare the classes a model tells apart with those of the data, where both say how many there are.

    Raises:
        UsageError: If the model has fewer.
    """
    own, there_are = model.hparams.get("num_classes"), getattr(datamodule, "num_classes", None)
    if isinstance(own, int) and isinstance(there_are, int) and own < there_are:
        raise UsageError(f"--model.num_classes={own}: the data have {there_are} classes; take {there_are} at least")


def check_shares(trainer: Trainer, datamodule: LightningDataModule | None) -> None:
    """Compare the global batch with the number of processes, and the machines with what is known of them, at the start.

    Raises:
        UsageError: If some process would get no sample, or would wait for machines that nobody has named.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and "MASTER_ADDR" not in os.environ:
        raise UsageError(
            f"--trainer.num_nodes={trainer.num_nodes}: it is not said where the other machines are; start this on each "
            "with torchrun or SLURM, or with MASTER_ADDR, MASTER_PORT and NODE_RANK set"
        )
    batch_size = getattr(datamodule, "batch_size", None)
    if isinstance(batch_size, int) and batch_size < trainer.world_size:
        raise UsageError(
            f"--data.batch_size={batch_size}: a global batch of {batch_size} cannot be shared by {trainer.world_size} "
            f"processes; take at least {trainer.world_size}, or fewer --trainer.devices"
        )
