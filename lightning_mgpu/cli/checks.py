"""What is seen to be wrong before anything starts: secrets among options, devices, another run."""

import os
import re
from typing import Any

import torch
from jsonargparse import Namespace

from lightning_mgpu.cli.errors import last_part
from lightning_mgpu.runs.checkpoint_file import flatten
from lightning_mgpu.runs.errors import UsageError

MOST_CPU_DEVICES = 16  # more than there are cores are for trying things out
SECRETS = "password|passwd|secret|token|api_?key|credentials"
# `pad_token` and its like are words of a language model
SECRET_NAME = re.compile(rf"(?i)(?!(pad|eos|bos|unk|mask|sep|cls)_).*({SECRETS})")
SECRET_URL = re.compile(r"://[^\s/@:]+:[^\s/@]+@")  # https://user:password@host


def check_secrets(config: Namespace) -> None:
    """Refuse secrets: `config.yaml`, checkpoints and W&B have every option."""
    for key, value in flatten(config.as_dict()).items():
        is_secret = isinstance(value, str) and (
            SECRET_NAME.fullmatch(last_part(key)) or SECRET_URL.search(value)
        )
        if value and is_secret:
            raise UsageError(
                f"--{key}: a secret, and every option is written to config.yaml: hand it over in "
                "an environment variable (most loggers read one), or read it in code of your own"
            )


def check_devices(config: Namespace) -> None:
    """Refuse absurd numbers of CPU devices: Lightning would start as many processes."""
    on_cpu = config.accelerator == "cpu" or not (
        torch.cuda.is_available() or torch.backends.mps.is_available()
    )
    most = max(MOST_CPU_DEVICES, os.cpu_count() or 1)
    if on_cpu and str(config.devices).isdigit() and int(config.devices) > most:
        raise UsageError(
            f"--trainer.devices={config.devices}: take a number of processes from 1 to {most}, or "
            "auto"
        )


def check_strategy(strategy: Any) -> None:
    """Refuse checkpoints that are directories, before an epoch is spent on one: runs read files."""
    shards = {"state_dict_type": "sharded", "save_distributed_checkpoint": "True"}
    files = {"state_dict_type": "full", "save_distributed_checkpoint": "False"}
    for name, refused in shards.items():
        if isinstance(strategy, Namespace) and str(strategy.get(f"init_args.{name}")) == refused:
            raise UsageError(
                f"--trainer.strategy.{name}={refused}: a checkpoint would be a directory of "
                f"shards, which --resume, test, predict and export cannot read: take {files[name]}"
            )


def check_same(config: dict[str, Any], before: dict[str, Any], where: object) -> None:
    """Refuse other values than a run's, or than those of a checkpoint's model; `before` is flat."""
    now = flatten(config)
    for key, value in before.items():
        if key not in now or now[key] != value:
            raise UsageError(
                f"--{key}={now.get(key)}: {where} has {value}, which stays: leave the option out"
            )
