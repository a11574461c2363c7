"""Trains LeNet under each exchange, and draws test accuracy against the bytes that a replica sends.

    python scripts/accuracy_against_bytes.py sign top_k --trainer.max_epochs=1

Four replicas in two processes train on real images for three epochs, with seeds 0 and 1. Those with
`every` are two replicas. Without names all rows are made. Options go to every run. It prints the
tables of docs/exchanges.md, and writes accuracy_against_bytes.png.
"""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

RUN = (
    *("--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_epochs=3"),
    *("--model.optimizer=AdamW", "--model.optimizer.lr=0.002", "--model.lr=null"),
    *("--wandb.mode=disabled", "--output.curve=false", "--output.pictures=false"),
)
STRATEGY = "--trainer.strategy"
ROWS = {  # the strategy's name, and its options
    "exact": ("exchange",),
    "half": ("exchange", f"{STRATEGY}.exchange=accuracy_against_bytes.half"),
    "top_k": ("exchange_top_k",),
    "top_k of 1 percent": ("exchange_top_k", f"{STRATEGY}.options={{fraction: 0.01}}"),
    "power_sgd": ("exchange_power_sgd",),
    "sign": ("exchange_sign",),
    "local_sgd": ("exchange_local_sgd",),
    "local_sgd every 64": ("exchange_local_sgd", f"{STRATEGY}.every=64"),
    "diloco": ("exchange_diloco",),
}
LINKS = {"100 Gbit/s": 100e9, "10 Gbit/s": 10e9, "50 Mbit/s": 50e6}
NAMES = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
GIVEN = sys.argv[1 + len(NAMES) :]


def half(X: Tensor, state: dict) -> Generator[Any, Any, Tensor]:
    return sum(each.to(X.dtype) for each in (yield X.half()))


def fit(row: str, seed: int) -> tuple[float, float, int]:
    """MB that a replica has sent, test accuracy in the end, and the number of steps."""
    strategy, *options = ROWS[row]
    replicas = (
        [] if "every" in row or row in ("local_sgd", "diloco") else [f"{STRATEGY}.replicas=4"]
    )
    with TemporaryDirectory() as run:
        line = [sys.executable, "-m", "lightning_mgpu", "fit", *RUN, f"{STRATEGY}={strategy}"]
        line += [*options, *replicas, f"--seed_everything={seed}", f"--run_dir={run}", *GIVEN]
        path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        out = subprocess.check_output(line, env=env, text=True)
        rows = [*csv.DictReader(Path(run, "metrics.csv").read_text().splitlines())]
    megabytes = float(re.findall(r"exchange: (\S+) MB", out)[0])
    accuracy = next(float(each["test_acc"]) for each in rows if each["test_acc"])
    return megabytes, accuracy, 1 + max(int(each["step"]) for each in rows if each["exchange_mb"])


def main() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlabel="MB sent per replica", ylabel="test accuracy, two seeds")
    axes.margins(x=0.12)  # for the names
    print("| exchange | MB per replica | test acc, two seeds |", " | ".join(LINKS), "|")
    print("| --- " * (3 + len(LINKS)) + "|")
    for row in NAMES or ROWS:
        found = [fit(row, seed) for seed in (0, 1)]
        megabytes, accuracies, steps = zip(*found)
        others = 1 if "every" in row or row in ("local_sgd", "diloco") else 3
        bits = 8e6 * mean(megabytes) / mean(steps) * others  # which a replica receives per step
        times = [f"{1e3 * bits / speed:.2g} ms" for speed in LINKS.values()]
        both = ", ".join(f"{each:.3f}" for each in accuracies)
        print(f"| {row} | {mean(megabytes):.2f} | {both} | {' | '.join(times)} |", flush=True)
        [line] = axes.plot(megabytes, accuracies, "o-", linewidth=0.5)
        look = {"color": line.get_color(), "fontsize": 8}
        axes.annotate(row, found[0][:2], (6, -3), textcoords="offset points", **look)
    figure.savefig("accuracy_against_bytes.png", dpi=110)


if __name__ == "__main__":
    main()
