"""Seconds of training to a test accuracy, which count for a recipe more than those per epoch.

python -m lightning_mgpu benchmark time_to_accuracy --target 0.9 --config experiment/lenet_fast.yaml
python -m lightning_mgpu benchmark time_to_accuracy --target 0.8 --seeds 0 1 2 --data.augment=true

All other options go to `fit`, with `--data.val_size=0`: the test set after every epoch. The seconds
are the run's `epoch_seconds`. They count compiling, but neither validation nor the start of Python.
Every seed trains to the end of its recipe, in a process of its own.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.benchmark.processes import command_line, machine, new_directory
from lightning_mgpu.commands import ToolParser
from lightning_mgpu.errors import UsageError
from lightning_mgpu.processes import run_in_group
from lightning_mgpu.project import command, program


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this measurement, and those of `fit`."""
    parser = ToolParser(f"{command()} benchmark time_to_accuracy", __doc__)
    parser.add_argument("--target", type=float, required=True, help="test accuracy, a fraction")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--run_dir", help="must be new")
    args, fit_args = parser.parse_known_args(arguments)
    if not 0 < args.target <= 1:
        raise UsageError(f"--target={args.target}: choose a fraction, such as 0.915")
    for name in ("--data.val_size", "--seed_everything"):
        if any(arg.partition("=")[0] == name for arg in fit_args):
            raise UsageError(f"{name}: time_to_accuracy sets it itself; --seeds names the seeds")
    return args, fit_args


def time_to_accuracy_command(arguments: Sequence[str]) -> None:
    """Entry point of `benchmark time_to_accuracy`; ends with the status of a `fit` that fails."""
    args, fit_args = parse(arguments)
    run_dir = new_directory(args.run_dir, "time_to_accuracy")
    report: dict[str, Any] = {"command": command_line(), "machine": machine()}
    report |= {"target": args.target, "runs": []}
    path = run_dir / "time_to_accuracy.json"
    for seed in args.seeds:
        epochs = run_fit(fit_args, seed, run_dir / f"seed_{seed}")
        report["runs"].append({"seed": seed, "epochs": epochs})
        path.write_text(json.dumps(report, indent=1))
        print(f"{summary(report['runs'], args.target)}\nreport: {path}")


def run_fit(fit_args: Sequence[str], seed: int, run_dir: Path) -> list[dict[str, float]]:
    """For every tested epoch of a `fit`: `accuracy`, and `seconds` of training until then."""
    command = [sys.executable, "-m", program(), "fit", "--wandb.mode=disabled", *fit_args]
    command += ["--data.val_size=0", f"--seed_everything={seed}", f"--run_dir={run_dir}"]
    if status := run_in_group(command):
        sys.exit(status)
    metrics = run_dir / "metrics.csv"
    rows = list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []
    accuracies = {int(row["epoch"]): float(row["val_acc"]) for row in rows if row.get("val_acc")}
    if not accuracies:
        settings = "limit_val_batches, check_val_every_n_epoch, fast_dev_run and logger"
        raise UsageError(f"no accuracy of an epoch in {metrics}: leave {settings} as they are")
    seconds = [float(row["epoch_seconds"]) for row in rows if row.get("epoch_seconds")]
    return [
        {"epoch": epoch + 1, "accuracy": accuracy, "seconds": sum(seconds[: epoch + 1])}
        for epoch, accuracy in accuracies.items()
    ]


def summary(runs: Sequence[dict[str, Any]], target: float) -> str:
    """Seconds to the target, if all seeds reached it, and final accuracy: mean and deviation."""
    reached = [
        [epoch["seconds"] for epoch in run["epochs"] if epoch["accuracy"] >= target] for run in runs
    ]
    seconds = [each[0] for each in reached if each]
    last_accuracies = [run["epochs"][-1]["accuracy"] for run in runs]
    if len(seconds) < len(runs):
        result = f"reached by {len(seconds)} of {len(runs)} seeds"
    else:
        result = f"{_spread(seconds, 1)} s of training over {len(runs)} seeds"
    return f"test accuracy {target}: {result}; accuracy at the end {_spread(last_accuracies, 4)}"


def _spread(values: Sequence[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} +- {spread:.{digits}f}"
