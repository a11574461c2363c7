"""A fresh process for every measurement, one by one; the machine that they run on, and its load."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import UsageError
from lightning_mgpu.processes import process_group

Result = dict[str, Any]
"""Of a configuration: `configuration`, `error`, `repeats`: what each process printed, or `None`."""


def measure(
    worker: str, plan: Mapping[str, dict[str, Any]], repeats: int, results: list[Result]
) -> None:
    """Measure every configuration of a plan, by name, and fill the list of results on the way.

    Every repeat has all of them, another one first each time: a machine that drifts favours none.
    What fails is not tried again.
    """
    results += [
        {"configuration": order, "repeats": [None] * repeats, "error": None}
        for order in plan.values()
    ]
    named = list(zip(plan, results))
    for repeat in range(repeats):
        first = repeat % len(named)
        for name, result in named[first:] + named[:first]:
            print(f"{repeat + 1}/{repeats} {name}", flush=True)
            if not result["error"]:
                result["repeats"][repeat], error = output_of(worker, result["configuration"])
                result["error"] = error and f"{name}: {error}"


def output_of(worker: str, order: dict[str, Any]) -> tuple[Any, str | None]:
    """The JSON that a worker prints in a process of its own, or `None` and its last words."""
    command = [sys.executable, "-m", f"{__package__}.{worker}", json.dumps(order)]
    with process_group(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        output, errors = process.communicate()
    if process.returncode:
        return None, (errors.strip().splitlines() or [f"status {process.returncode}"])[-1][:300]
    # libraries print lines, too
    [answer] = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(answer), None


def num_cores() -> int:
    """How many this process may run on: fewer under `taskset`, SLURM or in a container."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """What the figures are measured on and with. Warns if other programs want the cores.

    A step then waits for a core as often as it meets its threads: milliseconds, not microseconds.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    # how many threads wanted a core in the last minute
    cores, load = num_cores(), os.getloadavg()[0]
    if load > cores:
        print(
            f"warning: load {load:.1f} on {cores} cores: other programs disturb the figures",
            flush=True,
        )
    names = [torch.get_device_module(gpu).get_device_name(gpu) for gpu in gpus()]
    cpu = cpus[0] if cpus else platform.machine()
    date = f"{datetime.now():%Y-%m-%d}"
    about = {"date": date, "cpu": cpu, "cores": cores, "gpus": names, "load": load}
    return {**about, **{name: version(name) for name in ("torch", "lightning")}}


def new_directory(given: str | None, what: str) -> Path:
    """Make `--run_dir`, or a directory in `runs` with the time and what is measured in its name."""
    path = Path(given or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{what}").expanduser()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--run_dir={path} cannot be made: {error.strerror}; name a new directory"
        ) from error
    return path
