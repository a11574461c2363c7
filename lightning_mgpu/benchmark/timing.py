"""The book's `Timer` and `Benchmark`: wall-clock time of what devices have finished, not of what they were told.

    with Benchmark("ten products"):
        for _ in range(10):
            X @ X

Source: d2l.ai, 'Linear Regression' (`Timer`) and 'Asynchronous Computation' (`Benchmark`).
"""

import time
from collections.abc import Callable, Sequence

import torch

from lightning_mgpu.runs.devices import synchronize


class Timer:
    """Records several stretches of time, in seconds; every device is synchronised before the clock is read.

    Args:
        devices: Those that work; left out, all CUDA devices there are.
    """

    def __init__(
        self, devices: Sequence[torch.device] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.devices, self.clock = devices, clock
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        synchronize(self.devices)
        self._started = self.clock()

    def stop(self) -> float:
        """End a stretch, and return how long it was."""
        synchronize(self.devices)
        self.times.append(self.clock() - self._started)
        return self.times[-1]

    def avg(self) -> float:
        return sum(self.times) / len(self.times)

    def sum(self) -> float:
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """The sum after every stretch."""
        return [sum(self.times[: i + 1]) for i in range(len(self.times))]


class Benchmark:
    """Times a `with` block and prints `description: 0.1234 sec`; `seconds` has the figure."""

    def __init__(self, description: str = "Done", devices: Sequence[torch.device] | None = None) -> None:
        self.description, self.devices = description, devices
        self.seconds = float("nan")

    def __enter__(self) -> "Benchmark":
        self._timer = Timer(self.devices)
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = self._timer.stop()
        print(f"{self.description}: {self.seconds:.4f} sec")
