"""The module torch has for a kind of device of which a machine may have several: `torch.cuda` for GPUs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def device_module(device: torch.device) -> Any:
    """`torch.cuda` for a GPU, and so on; `None` for a CPU, of which there is one."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "device") else None


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a device the thread's current one, on which kernels start."""
    module = device_module(device)
    return module.device(device) if module is not None else nullcontext()
