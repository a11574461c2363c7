"""Where the time of a training step goes."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_mgpu.runs.devices import synchronize

PARTS = ("data", "transfer", "forward", "backward", "allreduce", "update", "framework")
"""In the order of a step. `framework` is what is left: the Trainer, callbacks, logging."""

ACTIONS = (  # of Lightning's profiler, by how their names end
    ("train_dataloader_next", "data"),
    ("batch_to_device", "transfer"),
    ("batch_transfer", "transfer"),
    (".training_step", "forward"),
    (".backward", "backward"),
    (".optimizer_step", "update"),
    (".optimizer_zero_grad", "update"),
)


class Parts:
    """Adds up the seconds of the parts of steps; a part inside another counts for itself alone.

    Args:
        devices: Synchronised before a clock is read.
    """

    def __init__(self, devices: Sequence[torch.device] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self.devices, self.clock = devices, clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[tuple[str, float]] = []  # innermost last: part, and since when it counts

    def start(self, part: str) -> None:
        now = self._now()
        self._pause(now)
        self._running.append((part, now))

    def stop(self) -> None:
        now = self._now()
        self._pause(now)
        self._running.pop()
        if self._running:
            self._running[-1] = self._running[-1][0], now

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self.start(part)
        try:
            yield
        finally:
            self.stop()

    def of_step(self, total: float, num_steps: int) -> dict[str, float]:
        """Seconds of every part of one of `num_steps` steps, which took `total` seconds: they add up to the step."""
        parts = {part: self.seconds.get(part, 0.0) / num_steps for part in PARTS}
        parts["framework"] += total / num_steps - sum(parts.values())
        return parts

    def _now(self) -> float:
        synchronize(self.devices)
        return self.clock()

    def _pause(self, now: float) -> None:
        if self._running:
            part, since = self._running[-1]
            self.seconds[part] += now - since


class PartsProfiler(Profiler):
    """Lightning's profiler interface on `Parts`; counts between `begin` and `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Parts | None = None
        self._open: list[tuple[str, bool]] = []

    def begin(self, parts: Parts) -> None:
        self.parts = parts

    def end(self) -> None:
        self.parts = None

    @override
    def start(self, action_name: str) -> None:
        part = next((part for end, part in ACTIONS if action_name.endswith(end)), None)
        is_counted = part is not None and self.parts is not None
        self._open.append((action_name, is_counted))
        if is_counted:
            assert self.parts is not None and part is not None
            self.parts.start(part)

    @override
    def stop(self, action_name: str) -> None:
        for i in range(len(self._open) - 1, -1, -1):
            if self._open[i][0] == action_name:
                _, is_counted = self._open.pop(i)
                if is_counted and self.parts is not None:
                    self.parts.stop()
                return
