"""The clock of all measurements, and the book's `Benchmark` (d2l.ai, 'Asynchronous Computation') with it."""

import time

import torch


def finished_time() -> float:
    """The clock, in seconds, when every GPU of this process has finished; the book waits for one, or for none."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            torch.cuda.synchronize(i)
    return time.perf_counter()


class Benchmark:
    """Times a `with` block and prints `description: 0.1234 sec`; the attribute `seconds` has the time."""

    def __init__(self, description: str = "Done") -> None:
        self.description, self.seconds = description, float("nan")

    def __enter__(self) -> "Benchmark":
        self._start = finished_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = finished_time() - self._start
        print(f"{self.description}: {self.seconds:.4f} sec")
