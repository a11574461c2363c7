"""`python -m lightning_mgpu benchmark`: which strategy is fastest, and what do a step's parts cost?

python -m lightning_mgpu benchmark --quick
python -m lightning_mgpu benchmark --strategies ddp dp manual_allreduce --models LeNet --devices 2
python -m lightning_mgpu benchmark --only steps --models LeNet --replicas 2 4 8
python -m lightning_mgpu benchmark --only exchange --algorithms ring my_allreduce.chain_allreduce
python -m lightning_mgpu benchmark --only cost --repeats 20
python -m lightning_mgpu benchmark time_to_accuracy --target 0.9 --config experiment/lenet_fast.yaml
"""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.benchmark import cost, exchange, time_to_accuracy
from lightning_mgpu.benchmark.plan import configurations, make_model
from lightning_mgpu.benchmark.processes import machine, measure, new_directory
from lightning_mgpu.benchmark.report import draw, headline, name_of, tables
from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import ToolParser, UsageError
from lightning_mgpu.strategies.names import make_strategy

PROG = "python -m lightning_mgpu benchmark"
SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 100 * 2**20]  # bytes a device
QUICK: dict[str, Any] = {"models": ["LeNet"], "repeats": 2, "num_steps": 10}
QUICK |= {"ks": [2], "sizes": [4 * 2**10, 256 * 2**10, 4 * 2**20], "seconds": 0.05}


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    result = ToolParser(
        prog=PROG, description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    add = result.add_argument
    small = "small defaults: LeNet, two repeats of ten steps, few sizes"
    add("--quick", action="store_true", help=small)
    only = "of training, the allreduce alone, or what the engine itself costs; left out, all"
    add("--only", choices=["steps", "exchange", "cost"], help=only)
    yours = "also dotted paths of your own"
    add("--models", nargs="+", default=["LeNet", "ResNet18"], help=yours)
    add("--repeats", type=int, default=5)
    add("--strategies", nargs="*", default=["ddp", "dp", "manual_allreduce"], help=yours)
    add("--devices", nargs="+", type=int, default=[2])
    several = "also measure so many replicas on one device"
    add("--replicas", nargs="+", type=int, default=[], help=several)
    add("--batch_size", type=int, default=256, help="global, shared by the devices")
    add("--num_steps", type=int, default=20, help="of each stretch that is timed")
    add("--algorithms", nargs="+", default=list(exchange.ALGORITHMS), help=yours)
    alone = "of the allreduce alone: "
    add("--sizes", nargs="*", type=int, default=SIZES, help=alone + "bytes a device")
    each = "for each algorithm, size, k and repeat"
    add("--seconds", type=float, default=0.2, help=alone + each)
    add("--run_dir", help="must be new")
    return result


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What to measure. Whatever does not exist, or computes wrong sums, is found now."""
    result = parser()
    result.set_defaults(ks=[2, 4, 8])  # of the allreduce alone: numbers of devices
    if "--quick" in arguments:  # other defaults; what is given goes before them
        result.set_defaults(**QUICK)
    args = result.parse_args(arguments)
    checks: Any = (
        (make_strategy, args.strategies),
        (make_model, args.models),
        (exchange.check_algorithm, args.algorithms),
    )
    for check, names in checks:
        for name in names:
            check(name)
    for name in ("repeats", "num_steps"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: measure at least one")
    if args.only in (None, "steps") and 0 < (num_gpus := len(gpus())) < max(args.devices):
        raise UsageError(
            f"--devices {max(args.devices)}: GPUs here: {num_gpus}; CUDA_VISIBLE_DEVICES= hides "
            "them"
        )
    return args


def main(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark` and of `benchmark time_to_accuracy`.

    Raises:
        UsageError: For arguments that make no sense, before anything is measured.
    """
    if arguments[:1] == ["time_to_accuracy"]:
        time_to_accuracy.main(arguments[1:])
        return
    args = parse(arguments)
    run_dir = new_directory(args.run_dir, "benchmark")
    command = shlex.join([*PROG.split(), *arguments])
    report: dict[str, Any] = {"command": command, "repeats": args.repeats, "machine": machine()}
    report |= {"results": [], "exchange": [], "cost": []}
    print(f"{args.repeats} repeats, to {run_dir}; Ctrl-C keeps what is done", flush=True)
    try:
        if args.only in (None, "steps"):
            orders = [vars(each) for each in configurations(args)]
            plan = {f"{order['model']}, {name_of(order)}": order for order in orders}
            measure("steps", plan, args.repeats, report["results"])
        if args.only in (None, "cost"):  # one process makes all repeats, which take turns
            order = {"num_steps": args.num_steps, "repeats": args.repeats}
            measure("cost", {"the engine's own cost": order}, 1, report["cost"])
        if args.only in (None, "exchange"):
            shared = {name: getattr(args, name) for name in ("models", "sizes", "ks", "seconds")}
            names = (*args.algorithms, exchange.LIMIT)
            plan = {f"{name} alone": {"algorithm": name, **shared} for name in names}
            measure("exchange", plan, args.repeats, report["exchange"])
    finally:  # also on Ctrl-C
        finish(report, run_dir)


def finish(report: dict[str, Any], run_dir: Path) -> None:
    """Write what was measured, show it and draw it."""
    report["machine"]["load"] = max(report["machine"]["load"], os.getloadavg()[0])
    (run_dir / "benchmark.json").write_text(json.dumps(report, indent=1))
    lines = [headline(report["machine"], report["command"], report["repeats"])]
    lines += tables(report["results"]) + exchange.exchange_tables(report["exchange"])
    lines += cost.cost_table(report["cost"])
    (run_dir / "benchmark.md").write_text(text := "\n".join(lines) + "\n")
    draw(report["results"], report["machine"], run_dir)
    exchange.plot_exchange(report["exchange"], run_dir)
    print(
        f"{text}\nreport: {run_dir / 'benchmark.md'}, {run_dir / 'benchmark.json'}, pictures "
        "beside them"
    )
