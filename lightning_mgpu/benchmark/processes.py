"""A fresh process for every measurement, one after the other; the machine that they run on, and its load."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.benchmark.plan import Configuration, interleaved
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.processes import process_group

TIMEOUT = 1800.0  # seconds of one measurement
SEVERAL_PROCESSES = ("ddp", "fsdp", "deepspeed")  # how the names of strategies begin that start a process a device
KEEP = {  # has glibc keep what a step frees: no page fault for every 4 KiB of it in the next step
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}


class MeasurementError(RuntimeError):
    """Something could not be measured; the message is the last line that its process wrote."""


def output_of(command: Sequence[str], what: str, env: dict[str, str] | None = None) -> list[Any]:
    """The JSON that a Python command prints, a line a value.

    Raises:
        MeasurementError: If it failed or took too long.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with process_group([sys.executable, *command], env=env, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{what}: not done after {TIMEOUT:g} s") from None
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        raise MeasurementError(f"{what}: {last[0][:300]}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # libraries print lines, too


def measure_steps(
    plan: Sequence[Configuration], repeats: int, num_steps: int | None, malloc: str, results: list[dict[str, Any]]
) -> None:
    """Measure everything, and fill the empty list of results on the way. What fails is not tried again."""
    results += [{"configuration": asdict(each), "repeats": [None] * repeats, "error": None} for each in plan]
    order = interleaved(list(zip(plan, results)), repeats)
    for number, (repeat, (configuration, result)) in enumerate(order, start=1):
        print(f"{number}/{len(order)} {configuration}", flush=True)
        if result["error"]:
            continue
        what = json.dumps({"configuration": asdict(configuration), "num_steps": num_steps})
        command = ["-m", "lightning_mgpu.benchmark.steps", what]
        try:
            [result["repeats"][repeat]] = output_of(command, str(configuration), environment(configuration, malloc))
        except MeasurementError as error:
            result["error"] = str(error)


def environment(configuration: Configuration, malloc: str) -> dict[str, str]:
    """The cores are shared out among the processes of a strategy; the allocator is the same for all."""
    num_processes = configuration.devices if configuration.engine.startswith(SEVERAL_PROCESSES) else 1
    threads = str(max(1, num_cores() // num_processes))
    return {**os.environ, "OMP_NUM_THREADS": threads, **(KEEP if malloc == "keep" else {})}


def num_cores() -> int:
    """How many this process may run on: under `taskset`, SLURM or in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(when: str, own: int = 0) -> float:
    """The machine's load; warns if more programs than the `own` ones want the cores.

    A step then waits for a core as often as it meets its threads: milliseconds, where the exchange takes microseconds.
    """
    found = round(os.getloadavg()[0], 1)
    if found > num_cores() + own:
        print(f"warning: load {found} on {num_cores()} cores {when}: other programs disturb the figures", flush=True)
    return found


def machine(malloc: str) -> dict[str, Any]:
    """What the figures are measured on and with."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "cpu": cpu,
        "cores": num_cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load": load("at the start"),
        "malloc": malloc,
        **{name: version(name) for name in ("torch", "lightning")},
    }


def new_directory(given: str | None, what: str) -> Path:
    """Make `--run_dir`, or a directory in `runs` with the time and what is measured in its name.

    Raises:
        UsageError: If it exists, or cannot be made.
    """
    path = Path(given or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{what}").expanduser()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--run_dir={path} cannot be made: {error.strerror}; name a new directory") from error
    return path
