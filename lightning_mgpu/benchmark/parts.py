"""Where the time of a training step goes."""

import time
from collections.abc import Callable, Iterable

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_mgpu.devices import synchronize

PARTS = ("data", "transfer", "forward", "backward", "allreduce", "update", "strategy", "framework")
"""In the order of a step. `strategy` is what a strategy of this package does besides: it puts
parameters into the module, follows edits and records what is logged. `framework` is the rest: the
Trainer, callbacks, logging."""

ACTIONS = {  # what Lightning calls the parts, after the last dot
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "update",
    "optimizer_zero_grad": "update",
}


def finished_clock(devices: Iterable[torch.device]) -> Callable[[], float]:
    """A clock, in seconds, that waits until these devices have finished. The book's waits for one.

    Leave out the GPUs of other processes: waiting for one would open a context there.
    """
    all_devices = list(devices)

    def now() -> float:
        synchronize(all_devices)
        return time.perf_counter()

    return now


class Parts(Profiler):
    """Adds up the seconds of every part while `is_on`. A part inside another counts only once.

    The clock must wait for the devices in use (`finished_clock`). The Trainer calls it through
    Lightning's profiler interface; a loop by hand writes `with parts.profile("forward"):`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.clock, self.is_on = clock, False
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[tuple[str, str]] = []  # innermost last: action and part
        self._since = 0.0

    @override
    def start(self, action_name: str) -> None:
        part = action_name if action_name in PARTS else ACTIONS.get(action_name.rpartition(".")[2])
        if self.is_on and part:
            self._count()
            self._open.append((action_name, part))

    @override
    def stop(self, action_name: str) -> None:
        if self._open and self._open[-1][0] == action_name:
            self._count()
            self._open.pop()

    def of_step(self, total: float, num_steps: int) -> dict[str, float]:
        """Seconds of each part of one of `num_steps` steps that took `total`; they sum to one."""
        parts = {part: seconds / num_steps for part, seconds in self.seconds.items()}
        parts["framework"] = total / num_steps - sum(parts.values())
        return parts

    def _count(self) -> None:
        """Give the time since the last call to the innermost part."""
        now = self.clock()
        if self._open:
            self.seconds[self._open[-1][1]] += now - self._since
        self._since = now
