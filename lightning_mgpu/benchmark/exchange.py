"""The allreduce functions alone: tables and a picture, beside what memory can do with the same bytes."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lightning_mgpu.allreduce import check_allreduce
from lightning_mgpu.benchmark.exchange_worker import ALGORITHMS, LIMIT, find_algorithm
from lightning_mgpu.benchmark.processes import Result
from lightning_mgpu.benchmark.report import over_repeats
from lightning_mgpu.runs.errors import UsageError

Row = dict[str, Any]
"""`case`, `k`, `algorithm`, the `bytes` and `num_tensors` of a device, and `repeats`: seconds, or `None`."""


def check_algorithm(name: str) -> None:
    """Find an allreduce and try its sums."""
    try:
        check_allreduce(find_algorithm(name), 3 * [torch.device("cpu")])
    except (ImportError, AttributeError, ValueError) as error:
        known = f"choose from {', '.join(ALGORITHMS)}, or give a dotted path, my_module.my_allreduce"
        raise UsageError(f"--algorithms {name}: {error}; {known}") from error


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for every case, k and algorithm, from what the processes have measured."""
    rows: dict[tuple[str, int, str], Row] = {}
    for result in results:
        name, repeats = result["configuration"]["algorithm"], result["repeats"]
        for repeat, measured in enumerate(repeats):
            for each in measured or ():
                new = {**each, "algorithm": name, "repeats": [None] * len(repeats)}
                row = rows.setdefault((each["case"], each["k"], name), new)
                row["repeats"][repeat] = each["seconds"]
    return list(rows.values())


def seconds_of(row: Row) -> float:
    return statistics.median(seconds for seconds in row["repeats"] if seconds)


def exchange_tables(results: Sequence[Result]) -> list[str]:
    """For every case a table: milliseconds, and how many times as fast as the textbook and as the memory."""
    lines = []
    rows = rows_of(results)
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {(row["algorithm"], row["k"]): row for row in rows if row["case"] == case}
        ks = sorted({k for _, k in own})
        lines += ["", f"**The allreduce alone: {case}**", ""]
        lines.append(f"| {' | '.join(['', *(f'k = {k}, ms | / textbook | / limit' for k in ks)])} |")
        lines.append("| --- |" + " ---: | ---: | ---: |" * len(ks))
        for name in dict.fromkeys(name for name, _ in own):
            cells = [name]
            for k in ks:
                row = own.get((name, k))
                cells.append(f"{seconds_of(row) * 1e3:.3f}" if row else "")
                for other in ("textbook", LIMIT):
                    times = over_repeats(lambda other, this: other / this, own.get((other, k)), row)
                    cells.append("" if times is None else f"{times:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *(f"\nNot measured: {result['error']}." for result in results if result["error"])]


def plot_exchange(results: Sequence[Result], directory: Path) -> None:
    """`exchange.png`, bandwidth against size, of one tensor a device: a panel for each k, a line for each algorithm."""
    if not (single := [row for row in rows_of(results) if row["num_tensors"] == 1]):
        return
    ks = sorted({row["k"] for row in single})
    figure = Figure(figsize=(4.5 * len(ks) + 1.5, 4), layout="constrained")
    for k, panel in zip(ks, figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]):
        for name in dict.fromkeys(row["algorithm"] for row in single):
            own = [row for row in single if (row["k"], row["algorithm"]) == (k, name)]
            points = sorted((row["bytes"], row["bytes"] / seconds_of(row)) for row in own)
            style = {"linestyle": "--", "color": "black"} if name == LIMIT else {}
            panel.plot([size for size, _ in points], [rate for _, rate in points], marker=".", label=name, **style)
        panel.set(title=f"k = {k}", xlabel="bytes a device", xscale="log", yscale="log")
        panel.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("bytes / second")
    handles = figure.axes[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize="small")
    figure.savefig(directory / "exchange.png", dpi=120)
