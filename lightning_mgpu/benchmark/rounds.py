"""Rounds of measurements, each in a fresh process, and the machine that they run on."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.benchmark.worker import Configuration
from lightning_mgpu.devices import gpus
from lightning_mgpu.tools import run_in_group

Measurement = dict[str, Any]
"""Has `title`, the `seconds` of every round, `error` (empty if there was none), and more."""


def measure_in_rounds(
    results: list[Measurement], repeats: int, measure: Callable[[Measurement], float]
) -> None:
    """Measure everything in every round. What failed once is not tried again.

    Every round begins with another one, so that a machine that slows down favours none.
    """
    for first in range(repeats):
        for i in range(len(results)):
            result = results[(first + i) % len(results)]
            try:
                if not result["error"]:
                    result["seconds"].append(measure(result))
            except Exception as error:
                result["error"] = " ".join(str(error).split())[:300]


def plan_steps(configuration: Configuration) -> Measurement:
    threads = max(1, num_cores() // configuration.processes)
    more = {"title": configuration.title, "threads": threads, "seconds": [], "error": ""}
    return {**vars(configuration), **more}


def seconds_per_step(result: Measurement) -> float:
    """Measure a configuration in a fresh process.

    Raises:
        RuntimeError: If the process prints no result; with the last line that it has printed.
    """
    print(f"round {len(result['seconds']) + 1}: {result['model']}, {result['title']}", flush=True)
    configuration = {field.name: result[field.name] for field in fields(Configuration)}
    command = ["env", f"OMP_NUM_THREADS={result['threads']}", sys.executable, "-W", "ignore", "-m"]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        run_in_group([*command, f"{__package__}.worker", json.dumps(configuration)], output)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in lines:
        if line.startswith('{"seconds": '):
            return float(json.loads(line)["seconds"])
    errors = [line for line in lines if "Error: " in line or "Exception: " in line]
    raise RuntimeError(["no output", *lines[-1:], *errors][-1])


def num_cores() -> int:
    """How many this process may run on: fewer under `taskset`, SLURM or in a container."""
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Hardware, versions and load (threads that wanted a core in the last minute)."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpus = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": num_cores(),
        "gpus": [torch.get_device_module(gpu).get_device_name(gpu) for gpu in gpus()],
        "load": os.getloadavg()[0],
        "torch": version("torch"),
        "lightning": version("lightning"),
    }
