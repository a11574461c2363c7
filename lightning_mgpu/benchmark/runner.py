"""Runs the plan: a fresh process for every measurement, results on disk after each, nothing lost on Ctrl-C."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu import __version__
from lightning_mgpu.benchmark.cores import num_cores
from lightning_mgpu.benchmark.plan import Configuration, interleaved
from lightning_mgpu.benchmark.worker import RESULT
from lightning_mgpu.runs.processes import process_group


class MeasurementError(RuntimeError):
    """A configuration could not be measured; the message is the last line its process wrote."""


def measure_in_process(
    configuration: Configuration, data: dict[str, str], warm_up: int, num_steps: int, malloc: str, timeout: float = 1800
) -> dict[str, Any]:
    """One measurement, in a process of its own with its share of the cores.

    Args:
        data: `root` and `source` of the images.

    Raises:
        MeasurementError: If it failed, or took longer than `timeout` seconds.
    """
    steps = {"warm_up": warm_up, "num_steps": num_steps}
    order = {"configuration": configuration.asdict(), "data": data, "malloc": malloc, **steps}
    command = [sys.executable, "-m", "lightning_mgpu.benchmark.worker", json.dumps(order)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with process_group(command, env=environment(configuration), **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{configuration.key}: no result after {timeout:.0f} s") from None
    for line in output.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))  # type: ignore[no-any-return]
    lines = errors.strip().splitlines()
    raise MeasurementError(f"{configuration.key}: {lines[-1] if lines else f'status {process.returncode}'}")


def environment(configuration: Configuration) -> dict[str, str]:
    """The cores are shared out among the processes of a strategy that starts several."""
    processes = configuration.devices if configuration.engine.startswith("ddp") else 1
    threads = max(1, num_cores() // processes)
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return {**own, "OMP_NUM_THREADS": str(threads)}


def calibrate(plan: list[Configuration], data: dict[str, str], malloc: str) -> dict[str, tuple[float, float]]:
    """For every model, seconds to start a process, and of a step of the hand-written loop."""
    times = {}
    for model in dict.fromkeys(configuration.model for configuration in plan):
        loop = next(each for each in plan if each.model == model and each.engine == "loop")
        start = time.monotonic()
        step = measure_in_process(loop, data, 1, 2, malloc)["step"]
        times[model] = max(time.monotonic() - start - 5 * step, 0.0), step
    return times


def expected_seconds(
    plan: list[Configuration],
    repeats: int,
    num_steps: Callable[[Configuration], tuple[int, int]],
    times: dict[str, tuple[float, float]],
) -> float:
    """How long the plan takes, from what `calibrate` found."""
    total = 0.0
    for configuration in plan:
        start, step = times[configuration.model]
        warm_up, steps = num_steps(configuration)
        processes = 1.5 if configuration.engine.startswith("ddp") else 1.0  # they start side by side, on shared cores
        share = configuration.batch_size / min(each.batch_size for each in plan)
        total += repeats * (start * processes + (warm_up + 2 * steps) * step * share)
    return total


def run_plan(
    plan: list[Configuration],
    repeats: int,
    num_steps: Callable[[Configuration], tuple[int, int]],
    data: dict[str, str],
    malloc: str,
    save: Callable[[list[dict[str, Any]]], None],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure everything; `save` gets all results after each, `None` where there is none.

    A configuration that fails is not tried again, and has no figures.
    """
    results = {
        configuration.key: {"configuration": configuration.asdict(), "repeats": [None] * repeats, "error": None}
        for configuration in plan
    }
    for repeat, configuration in interleaved(plan, repeats):
        result: dict[str, Any] = results[configuration.key]
        progress(configuration.key)
        if result["error"]:
            continue
        try:
            result["repeats"][repeat] = measure_in_process(configuration, data, *num_steps(configuration), malloc)
        except MeasurementError as error:
            result["error"] = str(error)
        save(list(results.values()))
    return list(results.values())


def machine(malloc: str) -> dict[str, Any]:
    """What the figures were measured on and with."""
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "date": f"{datetime.now():%Y-%m-%d}",
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "gpus": gpus,
        "malloc": malloc,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "torchmetrics")},
        "lightning-mgpu": __version__,  # there also where it is not installed
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
