"""The devices of a run, and waiting for them."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch import Trainer


def devices(trainer: Trainer) -> list[torch.device]:
    """The devices a run trains on, those of this node times the number of nodes."""
    own = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    return list(own) * trainer.num_nodes


def own_devices(trainer: Trainer) -> list[torch.device]:
    """The devices this process works on; to wait for another process's GPU would open a context of its own there."""
    several = getattr(trainer.strategy, "world_size", 1) == 1 and getattr(trainer.strategy, "parallel_devices", None)
    return list(several or [trainer.strategy.root_device])


def synchronize(devices: Sequence[torch.device] | None = None) -> None:
    """Wait for all work queued on every CUDA device of the list; left out, on all there are."""
    if devices is None:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def in_words(devices: Iterable[torch.device]) -> str:
    """`2 x cpu`, `cuda:0, cuda:1`, `cpu`: a device that stands there several times is counted."""
    counts = Counter(map(str, devices))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
