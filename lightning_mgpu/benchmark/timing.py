"""The book's `Timer` and `Benchmark` (d2l.ai, 'Linear Regression' and 'Asynchronous Computation').

Both wait until the devices have finished. The book's wait for one device, or for none.
"""

import time
from collections.abc import Callable

import torch


def synchronize() -> None:
    """Wait for the work queued on every GPU that this process uses."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            torch.cuda.synchronize(i)


def finished_time() -> float:
    """The clock, in seconds, when all devices have finished."""
    synchronize()
    return time.perf_counter()


class Timer:
    """Records stretches of time, in seconds."""

    def __init__(self, clock: Callable[[], float] = finished_time) -> None:
        self.clock = clock
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        self._started = self.clock()

    def stop(self) -> float:
        """End a stretch and return its length."""
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
    """Times a `with` block and prints `description: 0.1234 sec`; the attribute `seconds` has the time."""

    def __init__(self, description: str = "Done") -> None:
        self.description, self.seconds = description, float("nan")

    def __enter__(self) -> "Benchmark":
        self._timer = Timer()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = self._timer.stop()
        print(f"{self.description}: {self.seconds:.4f} sec")
