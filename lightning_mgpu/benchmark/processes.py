"""A fresh process for every measurement, one by one; the machine that they run on, and its load."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import UsageError
from lightning_mgpu.processes import process_group
from lightning_mgpu.project import command

Measurement = dict[str, Any]
"""`configuration`, a worker's arguments; `repeats`, what each process printed, or None; `error`."""


def measure(
    worker: str, plan: Mapping[str, dict[str, Any]], repeats: int, results: list[Measurement]
) -> None:
    """Measure every configuration of a plan, by name, and fill the list of results on the way.

    Every repeat measures all of them and begins with another one each time, so that a machine that
    slows down favours none. A configuration that failed is not tried again.
    """
    results += [
        {"configuration": configuration, "repeats": [None] * repeats, "error": None}
        for configuration in plan.values()
    ]
    named = list(zip(plan, results))
    for repeat in range(repeats):
        first = repeat % len(named)
        for name, result in named[first:] + named[:first]:
            print(f"{repeat + 1}/{repeats} {name}", flush=True)
            if not result["error"]:
                result["repeats"][repeat], error = run_worker(worker, result["configuration"])
                result["error"] = error and f"{name}: {error}"


def run_worker(worker: str, arguments: dict[str, Any]) -> tuple[Any, str | None]:
    """Run a worker in a process; returns what it prints (`print_result`), or None and its error."""
    command = [sys.executable, "-m", f"{__package__}.{worker}", json.dumps(arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with process_group(command, **pipes) as process:
        output, errors = process.communicate()
    if process.returncode:
        return None, (errors.strip().splitlines() or [f"status {process.returncode}"])[-1][:300]
    # libraries print lines, too
    [result] = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(result), None


def print_result(function: Callable[..., dict[str, Any] | None]) -> None:
    """In a worker: call its function with the arguments of `run_worker`; print what it returns."""
    if (result := function(**json.loads(sys.argv[1]))) is not None:
        print(json.dumps(result), flush=True)


def command_line() -> str:
    """The command that was typed."""
    return f"{command()} {shlex.join(sys.argv[1:])}"


def num_cores() -> int:
    """How many this process may run on: fewer under `taskset`, SLURM or in a container."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Hardware, versions and load, for the report. Warns if other programs want the cores.

    A step then often waits for a core: milliseconds, not microseconds.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    # how many threads wanted a core in the last minute
    cores, load = num_cores(), os.getloadavg()[0]
    if load > cores:
        programs = "other programs disturb the figures"
        print(f"warning: load {load:.1f} on {cores} cores: {programs}", flush=True)
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": cores,
        "gpus": [torch.get_device_module(gpu).get_device_name(gpu) for gpu in gpus()],
        "load": load,
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def new_directory(run_dir: str | None, what: str) -> Path:
    """Make `--run_dir`, or a directory in `runs` with the time and what is measured in its name."""
    path = Path(run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{what}").expanduser()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--run_dir={path} cannot be made: {error.strerror}; name a new directory"
        ) from error
    return path
