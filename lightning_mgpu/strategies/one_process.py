"""Devices by name, and a strategy that is one process, whatever the number of its devices: rank 0 of 1."""

import contextlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

MAX_CPU_DEVICES = 64


def device_module(device: torch.device) -> Any:
    """`torch.cuda` for a GPU, and so on; `None` for the CPU, of which there is one."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "device") else None


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a device the thread's current one, on which kernels start."""
    module = device_module(device)
    return nullcontext() if module is None else module.device(device)


def find_device(name: str | torch.device) -> torch.device:
    """A device by its name.

    Raises:
        MisconfigurationException: If this machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MisconfigurationException(f"parallel_devices: {name!r} is no device; 'cpu', 'cuda:0', ... are.") from None
    if (module := device_module(device)) is None:
        return device
    index = device.index or 0
    if index >= (count := module.device_count()):
        kind = device.type.upper()
        raise MisconfigurationException(f"parallel_devices: there is no {name!r}; torch sees {count} {kind} device(s).")
    return torch.device(device.type, index)


class OneProcess:
    """Ranks and collectives of a single process. The strategy refuses to be one of several."""

    name = "this strategy"
    num_nodes = 1  # the Trainer sets what it was asked for
    parallel_devices: list[torch.device] | None
    cluster_environment: Any

    # Whatever the environment says
    global_rank = local_rank = node_rank = 0
    world_size = 1
    is_global_zero = True
    is_distributed = False

    def check_launch(self) -> None:
        """Refuse what one process cannot be.

        Raises:
            MisconfigurationException: Under torchrun or SLURM, on several nodes, or with too many CPU devices.
        """
        processes = 1
        if self.cluster_environment is not None:
            with contextlib.suppress(KeyError):  # the variables of a launcher that has launched nothing
                processes = self.cluster_environment.world_size()
        if processes > 1 or self.num_nodes > 1:
            what = f"num_nodes={self.num_nodes}" if processes == 1 else f"{processes} were launched (torchrun, SLURM)"
            raise MisconfigurationException(
                f"{self.name} drives all its devices from one process on one node, but {what}: use "
                "--trainer.strategy=ddp for several processes, or start a single one."
            )
        if (count := len(self.parallel_devices or [])) > MAX_CPU_DEVICES:
            raise MisconfigurationException(f"{count} devices are too many: {self.name} takes up to {MAX_CPU_DEVICES}.")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For a `DistributedSampler` of the user's own: the whole batch comes from this process."""
        return {"num_replicas": 1, "rank": 0}

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        return

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision
