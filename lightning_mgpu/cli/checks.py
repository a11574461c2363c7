"""What can be seen to be wrong before anything starts: secrets among the options, devices that are not here."""

import os
import re

import torch
from jsonargparse import Namespace

from lightning_mgpu.cli.suggest import last_part
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.flatten import flatten

MOST_CPU_DEVICES = 16  # more than there are cores are for trying things out
SECRET_NAME = re.compile(r"(?i).*(password|passwd|secret|api_?key|credentials?)|(.*(api|auth|access|hf)_)?token")
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
    """Compare `--trainer.accelerator` and `--trainer.devices` with what is here.

    Raises:
        UsageError: For a kind of device that is not here, a number that is none, or one larger than what is here.
    """
    accelerator, devices = config.accelerator, config.devices
    num_gpus = torch.cuda.device_count()
    has_gpu = num_gpus > 0 or torch.backends.mps.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise UsageError(f"--trainer.accelerator={accelerator}: no GPU is found here; take cpu or auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not has_gpu)
    most = max(MOST_CPU_DEVICES, os.cpu_count() or 1) if on_cpu else num_gpus or 1
    what = f"a number of processes from 1 to {most}" if on_cpu else f"a number from 1 to {most}, a list, or -1 for all"
    is_number = isinstance(devices, int) or str(devices).lstrip("-").isdigit()
    in_range = is_number and (1 <= int(devices) <= most or (int(devices) == -1 and not on_cpu))
    if not in_range and devices != "auto" and (on_cpu or is_number):
        raise UsageError(f"--trainer.devices={devices}: take {what}, or auto")
