"""What can be seen to be wrong before anything starts: secrets among the options, devices that are not here."""

import os
import re

import torch
from jsonargparse import Namespace

from lightning_mgpu.cli.suggest import last_part
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.flatten import flatten

MOST_CPU_DEVICES = 16  # more than there are cores are for trying things out
SECRETS = "password|passwd|secret|token|api_?key|credentials?"
# `pad_token` and its like are words of a language model
SECRET_NAME = re.compile(rf"(?i)(?!(pad|eos|bos|unk|mask|sep|cls)_).*({SECRETS})")
SECRET_URL = re.compile(r"://[^\s/@:]+:[^\s/@]+@")  # https://user:password@host


def check_secrets(config: Namespace) -> None:
    """Refuse secrets: `config.yaml`, checkpoints and W&B have every option."""
    for key, value in flatten(config.as_dict()).items():
        is_secret = isinstance(value, str) and (SECRET_NAME.fullmatch(last_part(key)) or SECRET_URL.search(value))
        if value and is_secret:
            raise UsageError(
                f"--{key}: a secret, and every option is written to config.yaml: hand it over in an environment "
                "variable (most loggers read one), or read it in code of your own"
            )


def check_devices(config: Namespace) -> None:
    """Refuse absurd numbers of CPU devices, of which Lightning would start any, and a GPU that is not here."""
    accelerator, devices = config.accelerator, config.devices
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise UsageError(f"--trainer.accelerator={accelerator}: no GPU is found here; take cpu or auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not has_gpu)
    most = max(MOST_CPU_DEVICES, os.cpu_count() or 1)
    if on_cpu and devices != "auto" and str(devices) not in map(str, range(1, most + 1)):
        raise UsageError(f"--trainer.devices={devices}: take a number of processes from 1 to {most}, or auto")
