"""The allreduce functions alone, over sizes and on the gradients of models, beside what memory can do and gloo or NCCL.

A compiled function has a process of its own, because its OpenMP threads slow down the functions after it. So has a
function of your own. The others share a process. The processes take turns, and ratios are taken within a turn.
`flat` is what `gradient_as_bucket_view` does: the same bytes in one tensor a device.
"""

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from lightning_mgpu.allreduce import check_allreduce
from lightning_mgpu.benchmark.exchange_worker import ALGORITHMS, LIMIT, find_algorithm
from lightning_mgpu.benchmark.plan import interleaved
from lightning_mgpu.benchmark.processes import MeasurementError, output_of
from lightning_mgpu.benchmark.report import over_repeats
from lightning_mgpu.runs.errors import UsageError

SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 100 * 2**20]  # bytes a device
QUICK_SIZES = [4 * 2**10, 256 * 2**10, 4 * 2**20]
DISTRIBUTED = "torch.distributed"

Row = dict[str, Any]
"""`case`, `k`, `algorithm`, the `bytes` and `num_tensors` of a device, and `repeats`: seconds, or `None`."""


def check_algorithm(name: str) -> None:
    """Find an allreduce and try its sums.

    Raises:
        UsageError: If there is none, or it is wrong.
    """
    try:
        check_allreduce(find_algorithm(name), 3 * [torch.device("cpu")])
    except (ImportError, AttributeError, ValueError) as error:
        known = f"choose from {', '.join(ALGORITHMS)}, or give a dotted path, my_module.my_allreduce"
        raise UsageError(f"--algorithms {name}: {error}; {known}") from error


def cases_of(sizes: Sequence[int], models: Sequence[nn.Module]) -> dict[str, list[list[int]]]:
    """Shapes of the gradients to exchange, by what they are: `4 kB`, `LeNet`, `LeNet, flat`."""
    cases = {f"{size / 2**20:.4g} MB" if size >= 2**20 else f"{size / 2**10:.4g} kB": [[size // 4]] for size in sizes}
    for model in models:
        shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
        cases[type(model).__name__] = shapes
        cases[f"{type(model).__name__}, flat"] = [[num_bytes(shapes) // 4]]
    return cases


def num_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """Of float32 tensors."""
    return sum(4 * torch.Size(shape).numel() for shape in shapes)


def measure_exchange(
    names: Sequence[str],
    cases: dict[str, list[list[int]]],
    ks: Sequence[int],
    seconds: float,
    repeats: int,
    accelerator: str = "cpu",
) -> tuple[list[Row], list[str]]:
    """Rows, and sentences that say what was not measured.

    Args:
        seconds: For each algorithm, k, case and repeat.
    """
    shared = [name for name in names if name in ALGORITHMS and name != "compiled"]
    groups = [[*shared, LIMIT], *([name] for name in names if name not in shared), [DISTRIBUTED]]
    rows: dict[tuple[str, int, str], Row] = {}
    problems: dict[str, None] = {}
    for repeat, (k, group) in interleaved(list(itertools.product(ks, groups)), repeats):
        print(f"allreduce alone, repeat {repeat + 1} of {repeats}: k = {k}, {', '.join(group)}", flush=True)
        order = {"names": group, "k": k, "cases": cases, "seconds": seconds, "accelerator": accelerator}
        command = ["-m", "lightning_mgpu.benchmark.exchange_worker"]
        if group == [DISTRIBUTED]:
            command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}", *command]
            order["cases"] = {case: shapes for case, shapes in cases.items() if len(shapes) == 1}
            order["accelerator"] = accelerator if torch.cuda.device_count() >= k else "cpu"  # NCCL needs k GPUs
        try:
            for found in output_of([*command, json.dumps(order)], ", ".join(group)):
                for name, time in found["times"].items():
                    case, shapes = found["case"], cases[found["case"]]
                    about = {"bytes": num_bytes(shapes), "num_tensors": len(shapes), "repeats": [None] * repeats}
                    row = rows.setdefault((case, k, name), {"case": case, "k": k, "algorithm": name, **about})
                    row["repeats"][repeat] = time
        except MeasurementError as error:
            problems[str(error)] = None
    return sorted(rows.values(), key=lambda row: (list(cases).index(row["case"]), row["k"])), list(problems)


def seconds_of(row: Row) -> float:
    return statistics.median(seconds for seconds in row["repeats"] if seconds)


def exchange_tables(rows: Sequence[Row]) -> list[str]:
    """For every case a table: milliseconds, and how many times as fast as the textbook and as the memory."""
    lines = []
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
                others = [own.get((other, k)) for other in ("textbook", LIMIT)]
                ratios = [over_repeats(lambda other, this: other / this, other, row) for other in others]
                cells += ["" if times is None else f"{times:.2f}" for times in ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot_exchange(rows: Sequence[Row], path: str | Path) -> None:
    """Draw bandwidth against size, of one tensor a device: a panel for each k, a line for each algorithm."""
    single = [row for row in rows if row["num_tensors"] == 1]
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
    figure.savefig(path, dpi=120)
