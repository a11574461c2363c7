"""Seconds of training to a test accuracy: what counts for a recipe, rather than seconds an epoch.

python -m lightning_mgpu benchmark time_to_accuracy --target 0.9 --config experiment/lenet_fast.yaml
python -m lightning_mgpu benchmark time_to_accuracy --target 0.8 --seeds 0 1 2 --data.augment=true

All other options go to `fit`, with `--data.val_size=0`: the test set after every epoch. The seconds
are the run's `epoch_seconds`. They count compiling, but neither validation nor the start of Python.
Every seed trains to the end of its recipe, in a process of its own.
"""

import argparse
import csv
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.benchmark.processes import machine, new_directory
from lightning_mgpu.errors import ToolParser, UsageError
from lightning_mgpu.processes import run_in_group

PROG = "python -m lightning_mgpu benchmark time_to_accuracy"


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this measurement, and those of `fit`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ToolParser(
        prog=PROG, description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    parser.add_argument("--target", type=float, required=True, help="test accuracy, a fraction")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--run_dir", help="must be new")
    args, of_fit = parser.parse_known_args(arguments)
    if not 0 < args.target <= 1:
        raise UsageError(f"--target={args.target}: choose a fraction, 0.915 say")
    for name in ("--data.val_size", "--seed_everything"):
        if any(arg.partition("=")[0] == name for arg in of_fit):
            raise UsageError(f"{name}: time_to_accuracy sets it itself; --seeds names the seeds")
    return args, of_fit


def main(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark time_to_accuracy`; ends with the status of a `fit` that fails."""
    args, of_fit = parse(arguments)
    run_dir = new_directory(args.run_dir, "time_to_accuracy")
    about = {"command": shlex.join([*PROG.split(), *arguments]), "machine": machine()}
    report: dict[str, Any] = {**about, "target": args.target, "runs": []}
    for seed in args.seeds:
        report["runs"].append(
            {"seed": seed, "epochs": train(of_fit, seed, run_dir / f"seed_{seed}")}
        )
        (run_dir / "time_to_accuracy.json").write_text(json.dumps(report, indent=1))
        print(
            f"{summary(report['runs'], args.target)}\nreport: {run_dir / 'time_to_accuracy.json'}"
        )


def train(of_fit: Sequence[str], seed: int, run_dir: Path) -> list[dict[str, float]]:
    """Of one `fit`: the `accuracy` of every epoch tested, and `seconds` of training until then."""
    command = [sys.executable, "-m", "lightning_mgpu", "fit", "--wandb.mode=disabled", *of_fit]
    command += ["--data.val_size=0", f"--seed_everything={seed}", f"--run_dir={run_dir}"]
    if status := run_in_group(command):
        sys.exit(status)
    metrics = run_dir / "metrics.csv"
    rows = list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []
    tested = {int(row["epoch"]): float(row["val_acc"]) for row in rows if row.get("val_acc")}
    if not tested:
        settings = "limit_val_batches, check_val_every_n_epoch, fast_dev_run and logger"
        raise UsageError(f"no accuracy of an epoch in {metrics}: leave {settings} as they are")
    seconds = [float(row["epoch_seconds"]) for row in rows if row.get("epoch_seconds")]
    return [
        {"epoch": epoch + 1, "accuracy": accuracy, "seconds": sum(seconds[: epoch + 1])}
        for epoch, accuracy in tested.items()
    ]


def summary(runs: Sequence[dict[str, Any]], target: float) -> str:
    """Seconds to the target, if all seeds reached it, and final accuracy: mean and deviation."""
    reached = [
        [epoch["seconds"] for epoch in run["epochs"] if epoch["accuracy"] >= target] for run in runs
    ]
    seconds = [each[0] for each in reached if each]
    end = f"accuracy at the end {_spread([run['epochs'][-1]['accuracy'] for run in runs], 4)}"
    if len(seconds) < len(runs):
        return f"test accuracy {target}: reached by {len(seconds)} of {len(runs)} seeds; {end}"
    return (
        f"test accuracy {target}: {_spread(seconds, 1)} s of training over {len(runs)} seeds; {end}"
    )


def _spread(values: Sequence[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} +- {spread:.{digits}f}"
