"""Which strategy is fastest on this machine, and which allreduce?

python -m lightning_mgpu benchmark
python -m lightning_mgpu benchmark --models LeNet --strategies ddp my_package.MyStrategy
python -m lightning_mgpu benchmark --only steps --devices 1 2 4 --replicas 2 4
python -m lightning_mgpu benchmark --only exchange --algorithms ring my_module.my_allreduce

GPUs are measured where there are some; CUDA_VISIBLE_DEVICES= hides them. Ctrl-C keeps what is done.
"""

import inspect
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.allreduce import check_allreduce, find_allreduce
from lightning_mgpu.benchmark import exchange
from lightning_mgpu.benchmark.report import exchange_tables, headline, step_tables
from lightning_mgpu.benchmark.rounds import machine, measure_in_rounds, plan_steps, seconds_per_step
from lightning_mgpu.benchmark.worker import Configuration, make_model, make_trainer
from lightning_mgpu.cli.strategy_names import find_strategy
from lightning_mgpu.tools import UsageError, command, make_parser, replacing


def parse(arguments: Sequence[str]) -> Namespace:
    parser = make_parser("benchmark", __doc__)
    engines, models = ["ddp", "dp", "manual_allreduce"], ["LeNet", "ResNet18"]
    algorithms, sizes = [*exchange.COSTS], [0.004, 0.25, 4, 64]
    add = parser.add_argument
    add("--only", choices=("steps", "exchange"), help="the default is both")
    add("--strategies", nargs="+", default=engines, help="names, or paths of your own")
    add("--models", nargs="+", default=models, help="names, or paths of your own")
    add("--devices", nargs="+", type=int, default=[2])
    add("--replicas", nargs="+", type=int, default=[], help="on one device, measured as well")
    add("--batch_size", type=int, default=256, help="global")
    add("--num_steps", type=int, default=20, help="timed, after a warm-up")
    add("--repeats", type=int, default=5, help="rounds, over which medians are taken")
    add("--algorithms", nargs="+", default=algorithms, help="of the exchange: names or paths")
    add("--sizes", nargs="+", type=float, default=sizes, help="of the exchange: MB per device")
    add("--run_dir", help="where the report goes; must be new")
    return parser.parse_args(arguments)


def benchmark_command(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark`.

    Raises:
        UsageError: For arguments that make no sense, before anything is measured.
    """
    args = parse(arguments)
    directory = Path(args.run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_benchmark")
    report: dict[str, Any] = {"command": f"{command()} {shlex.join(sys.argv[1:])}"}
    report |= {"repeats": args.repeats, "machine": machine()}
    algorithms = [] if args.only == "steps" else args.algorithms
    try:
        plan = [] if args.only == "exchange" else configurations(args)
        for name in algorithms:
            check_allreduce(find_allreduce(name), 3 * [torch.device("cpu")])
        directory.mkdir(parents=True)
    except (ValueError, MisconfigurationException, OSError) as error:
        raise UsageError(f"benchmark: {error}") from error
    report["steps"] = [plan_steps(configuration) for configuration in plan]
    report["exchange"] = [
        {"title": name, "k": k, "size": size, "seconds": [], "error": ""}
        for k in args.devices
        for size in args.sizes
        for name in algorithms
        if k > 1
    ]
    try:
        measure_in_rounds(report["steps"], args.repeats, seconds_per_step)
        measure_in_rounds(report["exchange"], args.repeats, exchange.seconds_of_call)
    finally:  # also on Ctrl-C
        report["machine"]["load"] = max(report["machine"]["load"], os.getloadavg()[0])
        tables = step_tables(report["steps"]) + exchange_tables(report["exchange"])
        text = "\n".join([headline(report), *tables]) + "\n"
        print(text, flush=True)
        for suffix, content in (("md", text), ("json", json.dumps(report, indent=1))):
            with replacing(directory / f"benchmark.{suffix}") as part:
                part.write_text(content)
        print(f"report: {directory}/benchmark.md, {directory}/benchmark.json")


def configurations(args: Namespace) -> list[Configuration]:
    """Every model under every strategy, one device, and the loops by hand to compare with.

    Raises:
        ValueError, MisconfigurationException: If there is no such model, strategy or device.
    """
    engines: list[tuple[str, int, int | None]] = [("loop", 1, None), ("auto", 1, None)]
    for k in args.devices:
        engines += [("book", k, None)] if k > 1 else []
        engines += [(strategy, k, None) for strategy in args.strategies]
    signatures = {name: inspect.signature(find_strategy(name)[0]) for name in args.strategies}
    takers = [name for name, each in signatures.items() if "replicas" in each.parameters]
    for k in args.replicas:
        engines += [(engine, 1, k) for engine in ("book", *takers)]
    for model in args.models:
        make_model(model)  # raises a ValueError if there is none
    numbers = (args.batch_size, args.num_steps)
    plan = [Configuration(model, *each, *numbers) for model in args.models for each in engines]
    for each in plan:
        if each.engine not in ("loop", "book"):
            each.processes = make_trainer(each).world_size
    return plan
