"""`python -m lightning_mgpu benchmark`: which strategy is fastest here, and what does each part of a step cost?

python -m lightning_mgpu benchmark --quick
python -m lightning_mgpu benchmark --strategies ddp dp manual_allreduce --models LeNet ResNet18 --devices 2
python -m lightning_mgpu benchmark --devices 1 2 4 --scaling weak --malloc keep
python -m lightning_mgpu benchmark --only steps --models LeNet --replicas 2 4 8
python -m lightning_mgpu benchmark --only exchange --algorithms textbook ring my_allreduce.chain_allreduce
python -m lightning_mgpu benchmark time_to_accuracy --target 0.915 --config experiment/lenet_fast.yaml
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.benchmark import time_to_accuracy
from lightning_mgpu.benchmark.exchange import (
    QUICK_SIZES,
    SIZES,
    cases_of,
    check_algorithm,
    exchange_tables,
    measure_exchange,
    plot_exchange,
)
from lightning_mgpu.benchmark.exchange_worker import ALGORITHMS
from lightning_mgpu.benchmark.plan import configurations, find_strategy, make_model
from lightning_mgpu.benchmark.processes import load, machine, measure_steps, new_directory
from lightning_mgpu.benchmark.report import draw, headline, tables
from lightning_mgpu.cli.errors import ToolParser, UsageError

PROG = "python -m lightning_mgpu benchmark"
QUICK = {"models": ["LeNet"], "repeats": 2, "num_steps": 10, "ks": [2], "sizes": QUICK_SIZES, "seconds": 0.05}


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    result = ToolParser(prog=PROG, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = result.add_argument
    add("--quick", action="store_true", help="small defaults: LeNet, two repeats of ten steps, few sizes")
    add("--only", choices=["steps", "exchange"], help="of training, or the allreduce alone; left out, both")
    add("--models", nargs="+", default=["LeNet", "ResNet18"], help="also dotted paths of your own")
    add("--repeats", type=int, default=5)
    add("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    add("--strategies", nargs="*", default=["ddp", "dp", "manual_allreduce"], help="also dotted paths of your own")
    add("--devices", nargs="+", type=int, default=[2])
    add("--replicas", nargs="+", type=int, default=[], help="also measure so many replicas on one device")
    add("--batch_size", type=int, default=256, help="global, shared by the devices")
    add("--scaling", choices=["strong", "weak"], default="strong", help="weak: k times the batch on k devices")
    add("--num_steps", type=int, help="of a stretch; left out, about two seconds")
    add("--malloc", choices=["default", "keep"], default="default", help="keep: glibc keeps the memory a step frees")
    add("--algorithms", nargs="+", default=list(ALGORITHMS), help="also dotted paths of your own")
    add("--ks", nargs="+", type=int, default=[2, 4, 8], help="of the allreduce alone: numbers of devices")
    add("--sizes", nargs="*", type=int, default=SIZES, help="of the allreduce alone: bytes a device")
    add("--seconds", type=float, default=0.2, help="of the allreduce alone: for each algorithm, k, size and repeat")
    add("--run_dir", help="must be new")
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark` and of `benchmark time_to_accuracy`.

    Raises:
        UsageError: For arguments that make no sense, before anything is measured.
    """
    if arguments[:1] == ["time_to_accuracy"]:
        time_to_accuracy.main(arguments[1:])
        return
    args = parse(arguments)
    plan = configurations(args) if args.only != "exchange" else []
    run_dir = new_directory(args.run_dir, "benchmark")
    command = shlex.join([*PROG.split(), *arguments])
    report: dict[str, Any] = {"command": command, "repeats": args.repeats, "machine": machine(args.malloc)}
    report |= {"results": [], "exchange": [], "not_measured": []}
    print(f"{len(plan)} configurations, {args.repeats} repeats, to {run_dir}; Ctrl-C keeps what is done", flush=True)
    try:
        if plan:
            measure_steps(plan, args.repeats, args.num_steps, args.malloc, report["results"])
        if args.only != "steps":
            cases = cases_of(args.sizes, [make_model(name) for name in args.models])
            options = (args.ks, args.seconds, args.repeats, args.accelerator)
            report["exchange"], report["not_measured"] = measure_exchange(args.algorithms, cases, *options)
    finally:  # also on Ctrl-C
        finish(report, run_dir)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What to measure.

    Raises:
        UsageError: If a strategy, model or algorithm does not exist, or a number is out of range.
    """
    args = parser().parse_args(arguments)
    if args.quick:  # other defaults; what is given goes before them
        quick = parser()
        quick.set_defaults(**QUICK)
        args = quick.parse_args(arguments)
    checks = ((find_strategy, args.strategies), (make_model, args.models), (check_algorithm, args.algorithms))
    for check, names in checks:
        for name in names:
            check(name)
    for option in ("repeats", "batch_size", "devices", "replicas", "num_steps", "ks", "sizes", "seconds"):
        given = getattr(args, option)
        numbers = given if isinstance(given, list) else [given]
        if any(number is not None and number <= 0 for number in numbers):
            raise UsageError(f"--{option} {' '.join(map(str, numbers))}: take numbers above 0")
    num_gpus = torch.cuda.device_count()
    if args.accelerator == "auto":
        args.accelerator = "gpu" if num_gpus >= max(args.devices) else "cpu"
    if args.accelerator == "gpu" and num_gpus < max(args.devices):
        raise UsageError(f"--accelerator=gpu --devices {max(args.devices)}: there are {num_gpus} GPUs")
    return args


def finish(report: dict[str, Any], run_dir: Path) -> None:
    """Write what was measured, show it and draw it."""
    report["machine"]["load"] = max(report["machine"]["load"], load("at the end", own=1))
    (run_dir / "benchmark.json").write_text(json.dumps(report, indent=1))
    lines = [headline(report["machine"], report["command"], report["repeats"]), *tables(report["results"])]
    lines += [*exchange_tables(report["exchange"]), *(f"\nNot measured: {why}." for why in report["not_measured"])]
    (run_dir / "benchmark.md").write_text(text := "\n".join(lines) + "\n")
    draw(report["results"], report["machine"], run_dir)
    if any(row["num_tensors"] == 1 for row in report["exchange"]):
        plot_exchange(report["exchange"], run_dir / "exchange.png")
    print(f"{text}\nreport: {run_dir / 'benchmark.md'}, {run_dir / 'benchmark.json'}, pictures beside them")
