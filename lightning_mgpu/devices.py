"""The devices of a run: which they are, in words, and waiting for them."""

from collections import Counter
from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

SHARDING = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def devices(trainer: Trainer) -> list[torch.device]:
    """The devices a run trains on: those of this machine, times the number of machines."""
    own = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    return list(own) * trainer.num_nodes


def is_sharded(trainer: Trainer) -> bool:
    """Whether each process has only its shard of the parameters, while it trains and afterwards."""
    return isinstance(trainer.strategy, SHARDING)


def in_words(devices: Iterable[torch.device]) -> str:
    """`2 x cpu`, `cuda:0, cuda:1`, `cpu`: a device that stands there several times is counted."""
    counts = Counter(map(str, devices))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def own_devices(trainer: Trainer) -> list[torch.device]:
    """The devices this process works on. Waiting for another's GPU would open a context there."""
    several = getattr(trainer.strategy, "world_size", 1) == 1 and getattr(
        trainer.strategy, "parallel_devices", None
    )
    return list(several or [trainer.strategy.root_device])


def gpus() -> list[torch.device]:
    """The machine's GPUs, of any maker but Apple, whose only one shares memory with the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return []
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work queued on the devices of the list, whatever their kind."""
    for device in set(devices):
        if device.type == "mps":
            torch.mps.synchronize()  # takes no device
        elif device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
