"""`python -m lightning_mgpu benchmark`: which strategy is fastest, and what do a step's parts cost?

python -m lightning_mgpu benchmark --quick  # LeNet, two repeats of ten steps, few sizes
python -m lightning_mgpu benchmark --strategies ddp dp manual_allreduce --models LeNet --devices 2
python -m lightning_mgpu benchmark --only steps --models LeNet --replicas 2 4 8
python -m lightning_mgpu benchmark --only exchange --algorithms ring my_allreduce.chain_allreduce
python -m lightning_mgpu benchmark --only cost --repeats 20
python -m lightning_mgpu benchmark time_to_accuracy --target 0.9 --config experiment/lenet_fast.yaml
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from lightning_mgpu.benchmark import cost, exchange, time_to_accuracy
from lightning_mgpu.benchmark.plan import configurations
from lightning_mgpu.benchmark.processes import command_line, machine, measure, new_directory
from lightning_mgpu.benchmark.report import describe, headline, plot_parts, tables
from lightning_mgpu.commands import run_command
from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import command

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 100 * 2**20]  # bytes per device
QUICK: dict[str, Any] = {"models": ["LeNet"], "repeats": 2, "num_steps": 10}
QUICK |= {"ks": [2], "sizes": [4 * 2**10, 256 * 2**10, 4 * 2**20], "seconds": 0.05}
"""Defaults with `--quick`."""


def benchmark_command(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark` and of `benchmark time_to_accuracy`.

    Raises:
        UsageError: For arguments that make no sense, before anything is measured.
    """
    if arguments[:1] == ["time_to_accuracy"]:
        time_to_accuracy.time_to_accuracy_command(arguments[1:])
        return
    defaults = QUICK if "--quick" in arguments else {}
    others = [argument for argument in arguments if argument != "--quick"]
    run_command(benchmark, others, f"{command()} benchmark", __doc__, **defaults)


def benchmark(
    only: Literal["all", "steps", "exchange", "cost"] = "all",
    models: Sequence[str] = ("LeNet", "ResNet18"),
    repeats: PositiveInt = 5,
    strategies: Sequence[str] = ("ddp", "dp", "manual_allreduce"),
    devices: Sequence[int] = (2,),
    replicas: Sequence[int] = (),
    processes: Sequence[int] = (2,),
    batch_size: PositiveInt = 256,
    num_steps: PositiveInt = 20,
    algorithms: Sequence[str] = tuple(exchange.ALGORITHMS),
    sizes: Sequence[int] = SIZES,
    ks: Sequence[int] = (2, 4, 8),
    seconds: float = 0.2,
    run_dir: str | None = None,
) -> None:
    """Measure steps of training, the allreduce alone, and what the engine itself costs.

    Args:
        only: One of the three, or all.
        models: Names of models here, or dotted paths of your own.
        repeats: How often everything is measured.
        strategies: Names that Lightning knows, or dotted paths of your own.
        devices: Numbers of devices.
        replicas: Numbers of replicas on one device, which are measured as well.
        processes: Numbers of processes that share the devices, which are measured as well.
        batch_size: Global, shared by the devices.
        num_steps: Of each stretch that is timed.
        algorithms: Names of allreduce functions here, or dotted paths of your own.
        sizes: Of the allreduce alone: bytes per device.
        ks: Of the allreduce alone: numbers of devices.
        seconds: Of the allreduce alone: for each algorithm, size, k and repeat.
        run_dir: Where the report goes; must be new.
    """
    steps = configurations(models, strategies, devices, replicas, processes, batch_size, num_steps)
    for name in algorithms:
        exchange.check_algorithm(name)
    if only in ("all", "steps") and 0 < (num_gpus := len(gpus())) < max(devices):
        raise UsageError(
            f"--devices {max(devices)}: GPUs here: {num_gpus}; CUDA_VISIBLE_DEVICES= hides them"
        )
    directory = new_directory(run_dir, "benchmark")
    report: dict[str, Any] = {"command": command_line(), "repeats": repeats, "machine": machine()}
    report |= {"results": [], "exchange": [], "cost": []}
    print(f"{repeats} repeats, to {directory}; Ctrl-C keeps what is done", flush=True)
    try:
        if only in ("all", "steps"):
            plan = {f"{each['model']}, {describe(each)}": each for each in map(vars, steps)}
            measure("steps", plan, repeats, report["results"])
        if only in ("all", "cost"):  # one process makes all repeats, which take turns
            options = {"num_steps": num_steps, "repeats": repeats}
            measure("cost", {"the engine's own cost": options}, 1, report["cost"])
        if only in ("all", "exchange"):
            options = {"models": models, "sizes": sizes, "ks": ks, "seconds": seconds}
            names = (*algorithms, exchange.LIMIT)
            plan = {f"{name} alone": {"algorithm": name, **options} for name in names}
            measure("exchange", plan, repeats, report["exchange"])
    finally:  # also on Ctrl-C
        write_report(report, directory)


def write_report(report: dict[str, Any], directory: Path) -> None:
    """Write what was measured, print it and plot it."""
    report["machine"]["load"] = max(report["machine"]["load"], os.getloadavg()[0])
    (directory / "benchmark.json").write_text(json.dumps(report, indent=1))
    lines = [headline(report["machine"], report["command"], report["repeats"])]
    lines += tables(report["results"]) + exchange.exchange_tables(report["exchange"])
    lines += cost.cost_table(report["cost"])
    text = "\n".join(lines) + "\n"
    (directory / "benchmark.md").write_text(text)
    plot_parts(report["results"], report["machine"], directory)
    exchange.plot_exchange(report["exchange"], directory)
    files = f"{directory / 'benchmark.md'}, {directory / 'benchmark.json'}"
    print(f"{text}\nreport: {files}, pictures beside them")
