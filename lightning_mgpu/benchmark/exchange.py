"""The allreduce functions alone, in one process: k tensors of several sizes, on GPUs or on the CPU.

Between the processes of `manual_allreduce` the gradients take other ways (docs/strategies.md).
"""

import math
import time
from collections.abc import Callable

import torch

from lightning_mgpu.allreduce import find_allreduce
from lightning_mgpu.benchmark.rounds import Measurement
from lightning_mgpu.devices import gpus, synchronize

COSTS: dict[str, Callable[[int], float]] = {
    "textbook": lambda k: k - 1,
    "key_value": lambda k: k - 1,
    "tree": lambda k: math.ceil(math.log2(k)),
    "sharded": lambda k: 2 * (k - 1) / k,
    "ring": lambda k: 2 * (k - 1) / k,
    "foreach": lambda k: k - 1,
}
"""Tensors that the busiest of k devices sends: the table in `allreduce/__init__.py`."""


def seconds_of_call(result: Measurement) -> float:
    """Seconds of a call on k float32 tensors of `size` MB each, for `result["title"]`."""
    # imported late: it prints that there is no CUDA
    from torch.utils.benchmark import Timer

    available = gpus() or [torch.device("cpu")]
    devices = [available[i % len(available)] for i in range(result["k"])]
    tensors = [torch.zeros(round(result["size"] * 2**18), device=device) for device in devices]
    function = find_allreduce(result["title"])

    def finished_clock() -> float:
        synchronize(devices)
        return time.perf_counter()

    function(tensors)  # allocates
    names, num_threads = {"function": function, "tensors": tensors}, torch.get_num_threads()
    timer = Timer("function(tensors)", "", "", finished_clock, names, num_threads=num_threads)
    return float(timer.blocked_autorange(min_run_time=0.1).median)
