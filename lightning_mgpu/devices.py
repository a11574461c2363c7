"""The devices of a run: listing, describing and synchronizing them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer


def devices(trainer: Trainer) -> list[torch.device]:
    """The devices of a run: this machine's devices times the number of machines."""
    strategy: Any = trainer.strategy
    local = getattr(strategy, "devices", None) or getattr(strategy, "parallel_devices", None)
    return [*(local or [strategy.root_device])] * trainer.num_nodes


def process_devices(trainer: Trainer) -> list[torch.device]:
    """The devices of this process. Synchronizing any other GPU would create a context on it."""
    return devices(trainer) if trainer.world_size == 1 else [trainer.strategy.root_device]


def describe_replicas(trainer: Trainer) -> str:
    """`2 x cpu`, `4 x cpu on 4 machines`, `4 replicas on 1 x cpu`, `4 replicas on 2 machines`."""
    used, num_nodes = devices(trainer), trainer.num_nodes
    k = getattr(trainer.strategy, "num_replicas", None) or len(used)
    machines = f"{num_nodes} machines" if num_nodes > 1 else ""
    if k != len(used):
        where = machines or describe_devices(used)
        return f"{k} replicas on {where if len(used) > 1 else f'1 x {where}'}"
    return describe_devices(used) + (f" on {machines}" if machines else "")


def describe_devices(devices: Iterable[torch.device]) -> str:
    """`2 x cpu`, `cuda:0, cuda:1`, `cpu`: repeated devices are counted."""
    counts = Counter(map(str, devices))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def gpus() -> list[torch.device]:
    """The GPUs of this machine, without Apple's, which shares the memory of the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work queued on these devices."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
