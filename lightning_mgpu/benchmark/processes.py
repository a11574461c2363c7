"""Runs the plan: a fresh process for every measurement, one after the other."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu import __version__
from lightning_mgpu.benchmark.plan import Configuration, interleaved, key_of
from lightning_mgpu.benchmark.worker import RESULT
from lightning_mgpu.runs.errors import UsageError

SEVERAL_PROCESSES = ("ddp", "fsdp", "deepspeed")  # how the names of strategies begin that start a process a device
KEEP = {  # has glibc keep what a step frees: no page fault for every 4 KiB of it in the next step
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}


class MeasurementError(RuntimeError):
    """Something could not be measured; the message is the last line that its process wrote."""


@contextlib.contextmanager
def process_group(command: Sequence[str], **kwargs: Any) -> Iterator[subprocess.Popen]:
    """Start a command. At the end of the block it is killed with all processes it has started."""
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, **kwargs)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(command: Sequence[str], what: str, timeout: float, env: dict[str, str] | None = None) -> list[str]:
    """The lines that a command prints.

    Raises:
        MeasurementError: If it failed, or took longer than `timeout` seconds.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with process_group(command, env=env, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{what}: not done after {timeout:g} s") from None
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [f"status {process.returncode}"]
        raise MeasurementError(f"{what}: {last[0][:300]}")
    return list(output.splitlines())


def measure_in_process(
    configuration: Configuration, images: dict[str, str], num_steps: int | None, malloc: str
) -> dict[str, Any]:
    """One measurement, as `Stretches.result` has it."""
    order = {"configuration": asdict(configuration), "images": images, "num_steps": num_steps}
    command = [sys.executable, "-m", "lightning_mgpu.benchmark.worker", json.dumps(order)]
    lines = output_of(command, key_of(asdict(configuration)), 1800.0, environment(configuration, malloc))
    [result] = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
    return dict(result)


def environment(configuration: Configuration, malloc: str) -> dict[str, str]:
    """The cores are shared out among the processes of a strategy; the allocator is the same for all."""
    processes = configuration.devices if configuration.engine.startswith(SEVERAL_PROCESSES) else 1
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    own["OMP_NUM_THREADS"] = str(max(1, num_cores() // processes))
    return own | (KEEP if malloc == "keep" else {})


def run_plan(
    plan: Sequence[Configuration],
    repeats: int,
    measure: Callable[[Configuration], dict[str, Any]],
    results: list[dict[str, Any]],
) -> None:
    """Measure everything, and fill the empty list of results on the way. What fails is not tried again."""
    results += [{"configuration": asdict(each), "repeats": [None] * repeats, "error": None} for each in plan]
    order, start = interleaved(list(zip(plan, results)), repeats), time.monotonic()
    for number, (repeat, (configuration, result)) in enumerate(order):
        left = (time.monotonic() - start) / max(number, 1) * (len(order) - number)
        about = f", about {left / 60:.0f} min left" if number >= len(plan) else ""
        print(f"{number + 1}/{len(order)} {key_of(result['configuration'])}{about}", flush=True)
        try:
            result["repeats"][repeat] = None if result["error"] else measure(configuration)
        except MeasurementError as error:
            result["error"] = str(error)


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
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
        "lightning-mgpu": __version__,
    }


def new_directory(given: str | None, what: str) -> Path:
    """Make `--run_dir`, or a directory in `runs` with the time and what is measured in its name.

    Raises:
        UsageError: If it is not empty, or cannot be made.
    """
    path = Path(given or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{what}").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--run_dir={path} cannot be made: {error.strerror}; choose another") from error
    if any(path.iterdir()):
        raise UsageError(f"--run_dir={path} exists and is not empty: name a new directory, one run has one")
    return path
