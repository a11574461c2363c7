"""The cores a measurement may use."""

import os


def num_cores() -> int:
    """How many this process may run on: under `taskset`, SLURM or in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
