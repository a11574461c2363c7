"""Measure milliseconds per training step of strategies, models and options.

python -m lightning_mgpu benchmark --model=ResNet18 --data.batch_size=64 --num_steps 5
python -m lightning_mgpu benchmark --devices 1 "fp32=" "bf16=--trainer.precision=bf16-mixed"

A ROW is a label and options of `fit`, and may override --devices. Options not listed below are
passed to every `fit`. Each runs in new processes, on random images unless --data or --data.source
is given; its second epoch is timed. Rounds are interleaved; ratios are per round. Ctrl-C stops.
"""

import csv
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lightning_mgpu.cli.options import read_options
from lightning_mgpu.cli.training_cli import TrainingCLI
from lightning_mgpu.runs.metrics import read_rows
from lightning_mgpu.tools import PACKAGE, UsageError, make_parser, program, run_in_group

ROWS = ["one device=--trainer.devices=1 --trainer.strategy=auto"]
ROWS += [f"{name}=--trainer.strategy={name}" for name in ("ddp", "dp", "manual_allreduce")]
OFF = ["--trainer.limit_val_batches=0", "--trainer.limit_test_batches=0"]
OFF += ["--trainer.enable_checkpointing=false", "--output.curve=false", "--wandb.mode=disabled"]


def benchmark_command(arguments: Sequence[str]) -> None:
    parser = make_parser("benchmark", __doc__)
    parser.usage = f"{parser.prog} [options] [ROW ...] [options of fit]"
    add = parser.add_argument
    add("--devices", "--trainer.devices", type=int, default=2, help="device count (default: 2)")
    add("--num_steps", type=int, default=50, help="steps per epoch (default: 50)")
    add("--repeats", type=int, default=5, help="number of rounds (default: 5)")
    add("--csv", default=os.devnull, help="CSV file for all measurements")
    args, words = parser.parse_known_args(arguments)
    rows = [word for word in words if re.match("[^-=][^=]*=(--|$)", word)]
    shared = [*OFF, f"--trainer.limit_train_batches={args.num_steps}"]
    shared += [word for word in words if word not in rows]
    shared.append(f"--trainer.devices={args.devices}")
    if not rows and re.search("--trainer.strategy[= ]", " ".join(words)):
        parser.error("--trainer.strategy: set by the default ROWs; use it in a ROW")
    pairs = [row.split("=", 1) for row in rows or ROWS]
    lines = {label: complete([*shared, *shlex.split(text)]) for label, text in pairs}
    if len(lines) < len(pairs):
        parser.error("two ROWs have the same label")
    counts = re.findall(r"--trainer\.(?:devices|strategy\.replicas)\W+(\d+)", str(lines))
    most, cores = max(map(int, counts)), len(os.sched_getaffinity(0))
    # rows are comparable only with equal numbers of threads per process
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // most)))
    if most * int(threads) > cores:
        print(f"{most} processes with {threads} threads each share {cores} cores")
    ms: dict[str, list[float]] = {label: [] for label in lines}  # per step, by round
    failed: dict[str, str] = {}
    order = [*lines]
    with open(args.csv, "w", buffering=1) as file:
        csv.writer(file).writerow(["round", "row", "ms_per_step"])
        try:
            for number in range(1, args.repeats + 1):
                for label in [label for label in order if label not in failed]:
                    print(f"round {number}: {label}", file=sys.stderr, flush=True)
                    try:
                        ms[label].append(ms_per_step(lines[label]))
                        csv.writer(file).writerow([number, label, ms[label][-1]])
                    except ChildProcessError as error:
                        failed[label] = f"failed: {error}".replace("|", "/")
                order.append(order.pop(0))  # the next round begins with the next row
        finally:  # also after Ctrl-C
            print_table(ms, failed)
    if len(failed) == len(lines):
        raise UsageError("no row could be measured; see the table above")


def complete(line: list[str]) -> list[str]:
    """Complete the options of a `fit`, and check them before anything is measured."""
    line = [*line, "--trainer.max_epochs=2"]
    options = read_options("fit", line)
    if program() == PACKAGE:  # a project may add options to `fit`
        TrainingCLI("fit", options)
    is_ours = options.base["data"]["class_path"] == f"{PACKAGE}.data.FashionMNIST"
    is_chosen = {"data", "data.source"} & options.cli_overrides.keys()
    return [*line, "--data.source=synthetic"] if is_ours and not is_chosen else line


def ms_per_step(line: list[str]) -> float:
    """Run and time a `fit`. Raises a ChildProcessError with its error message if it fails."""
    with TemporaryDirectory() as run, Path(run, "log").open("w+", errors="replace") as log:
        command = [sys.executable, "-m", program(), "fit", *line, f"--run_dir={run}/run"]
        status = run_in_group(command, log)
        log.seek(0)
        output = [f"exit status {status}", *filter(str.strip, log)]
        epochs = [row for row in read_rows(Path(run, "run")) if row.get("epoch_seconds")]
    if status or len(epochs) < 2:
        reason = next((text for text in output if text.startswith("error: ")), output[-1])
        raise ChildProcessError(reason.partition(" (--traceback")[0].strip())
    num_steps = int(epochs[1]["step"]) - int(epochs[0]["step"])
    return 1e3 * float(epochs[1]["epoch_seconds"]) / num_steps


def print_table(ms: dict[str, list[float]], failed: dict[str, str]) -> None:
    about = f"torch {version('torch')}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    first, base = next(iter(ms.items()))
    print(f"| {about} | ms per step (lowest to highest) | / {first} |\n| --- | ---: | ---: |")
    for label, times in ms.items():
        cell = f"{median(times):.1f} ({min(times):.1f} to {max(times):.1f})" if times else ""
        ratio = f"{median(t / b for t, b in zip(times, base)):.2f}" if times and base else ""
        print(f"| {label} | {failed.get(label, cell)} | {ratio} |")
