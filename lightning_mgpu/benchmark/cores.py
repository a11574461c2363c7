"""The cores and the memory a measurement may use."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch


def num_cores() -> int:
    """How many this process may run on: under `taskset`, SLURM or in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(devices: Sequence[torch.device]) -> float:
    """Bytes free where the tensors go: on the fullest kind of `devices`; infinite where the system does not say."""
    free = [float(torch.cuda.mem_get_info(d)[0]) for d in devices if d.type == "cuda"]
    if any(d.type == "cpu" for d in devices):
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            free.append(next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
        except (OSError, StopIteration):  # not Linux
            free.append(float("inf"))
    return min(free, default=float("inf"))
