"""What can be seen to be wrong before anything starts: secrets among the options, absurd numbers of devices."""

import os
import re

import torch
from jsonargparse import Namespace

from lightning_mgpu.cli.errors import last_part
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.flatten import flatten

MOST_CPU_DEVICES = 16  # more than there are cores are for trying things out
SECRET_NAME = re.compile(r"(?i)(.*_)?(password|passwd|secret|api_?key|credentials)|((api|auth|access)_)?token")
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
    """Refuse a GPU that is not here, and absurd numbers of CPU devices: Lightning would start as many processes."""
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config.accelerator in ("gpu", "cuda") and not has_gpu:
        raise UsageError(f"--trainer.accelerator={config.accelerator}: no GPU is found here; take cpu or auto")
    on_cpu = config.accelerator == "cpu" or (config.accelerator == "auto" and not has_gpu)
    most = max(MOST_CPU_DEVICES, os.cpu_count() or 1)
    if on_cpu and str(config.devices).isdigit() and int(config.devices) > most:
        raise UsageError(f"--trainer.devices={config.devices}: take a number of processes from 1 to {most}, or auto")
