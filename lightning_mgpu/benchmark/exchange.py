"""The allreduce functions alone: tables and a picture, beside what memory does with the same bytes.

Each function is timed in a process of its own: a compiled one's OpenMP threads slow the others.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import Allreduce, allreduce_many, check_allreduce
from lightning_mgpu.benchmark.parts import finished_clock
from lightning_mgpu.benchmark.plan import make_model
from lightning_mgpu.benchmark.processes import Measurement, print_result
from lightning_mgpu.benchmark.report import markdown, median_over_repeats, not_measured
from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import UsageError

ALGORITHMS: dict[str, Allreduce] = {
    "textbook": allreduce.textbook_allreduce,
    "tree": allreduce.tree_allreduce,
    "sharded": allreduce.sharded_allreduce,
    "ring": allreduce.ring_allreduce,
    "blocked": allreduce.blocked_allreduce,
    "foreach": allreduce.foreach_allreduce,
    "compiled": allreduce.compiled_allreduce,
}
LIMIT = "read-modify-write"
"""Not an allreduce, but what memory can do with the same bytes: `t.add_` on each of k tensors."""


def find_algorithm(name: str) -> Allreduce:
    """An allreduce by its name or its dotted path."""
    module, _, attribute = name.rpartition(".")
    return ALGORITHMS.get(name) or getattr(importlib.import_module(module), attribute)


def check_algorithm(name: str) -> None:
    """Find an allreduce and try its sums."""
    try:
        check_allreduce(find_algorithm(name), 3 * [torch.device("cpu")])
    except (ImportError, AttributeError, ValueError) as error:
        names = ", ".join(ALGORITHMS)
        raise UsageError(
            f"--algorithms {name}: {error}; choose from {names}, or give a dotted path, "
            "my_module.my_allreduce"
        ) from error


def cases_of(sizes: Sequence[int], models: Sequence[nn.Module]) -> dict[str, list[torch.Size]]:
    """Shapes of the gradients to exchange, by the name of a case: `4 kB`, `LeNet`, `LeNet, flat`.

    `flat` is what `gradient_as_bucket_view` does: the same bytes in one tensor per device.
    """
    cases = {}
    for size in sizes:
        name = f"{size / 2**10:.4g} kB" if size < 2**20 else f"{size / 2**20:.4g} MB"
        cases[name] = [torch.Size([size // 4])]
    for model in models:
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
        name, total = type(model).__name__, sum(shape.numel() for shape in shapes)
        cases |= {name: shapes, f"{name}, flat": [torch.Size([total])]}
    return cases


@torch.no_grad()
def read_modify_write(gradients: list[list[Tensor]]) -> None:
    for tensors in gradients:
        for tensor in tensors:
            tensor.add_(0.0)  # zeros stay zeros: repeated sums would end as inf


def time_function(
    name: str, shapes: Sequence[torch.Size], devices: Sequence[torch.device], seconds: float
) -> float:
    """Seconds of a call on float32 gradients of these shapes, measured for `seconds`."""
    # imported late: it prints that there is no CUDA
    from torch.utils.benchmark import Timer

    gradients = [[torch.zeros(*shape, device=device) for device in devices] for shape in shapes]
    call: Callable[[], None] = functools.partial(read_modify_write, gradients)
    if name != LIMIT:
        call = functools.partial(allreduce_many, find_algorithm(name), gradients)
    call()  # compiles, allocates
    clock, num_threads = finished_clock(devices), torch.get_num_threads()
    timer = Timer("call()", globals={"call": call}, timer=clock, num_threads=num_threads)
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def seconds_of(result: Measurement, case: str, k: int) -> float | None:
    """The median seconds of a call; None where nothing was measured."""
    return median_over_repeats(lambda this: this[case][str(k)], result)


def exchange_tables(results: Sequence[Measurement]) -> list[str]:
    """A table for every case: milliseconds, and speed beside the textbook's and the memory's."""
    by_name = {result["configuration"]["algorithm"]: result for result in results}
    lines = []
    for case in cases_measured(results):
        ks = results[0]["configuration"]["ks"]
        head = ["", *(title for k in ks for title in (f"k = {k}, ms", "/ textbook", "/ limit"))]
        rows = []
        for name, result in by_name.items():
            cells = [name]
            for k in ks:
                seconds = seconds_of(result, case, k)
                cells.append("" if seconds is None else f"{seconds * 1e3:.3f}")
                others = by_name.get("textbook"), by_name.get(LIMIT)
                cells += [_ratio(result, other, case, k) for other in others]
            rows.append(cells)
        lines += markdown(f"The allreduce alone: {case}", head, rows)
    return [*lines, *not_measured(results)]


def _ratio(result: Measurement, other: Measurement | None, case: str, k: int) -> str:
    """How many times as fast as another algorithm."""
    ratio = median_over_repeats(
        lambda this, other: other[case][str(k)] / this[case][str(k)], result, other
    )
    return "" if ratio is None else f"{ratio:.2f}"


def cases_measured(results: Sequence[Measurement]) -> dict[str, Any]:
    """The measurements of the first process that ended, by case."""
    return next((repeat for result in results for repeat in result["repeats"] if repeat), {})


def plot_exchange(results: Sequence[Measurement], directory: Path) -> None:
    """`exchange.png`: bandwidth by bytes per device; one panel per k, one line per algorithm."""
    cases = cases_measured(results)
    sizes = {case: each["bytes"] for case, each in cases.items() if each["num_tensors"] == 1}
    if not sizes:
        return
    ks = results[0]["configuration"]["ks"]
    figure = Figure(figsize=(4.5 * len(ks) + 1.5, 4), layout="constrained")
    for k, panel in zip(ks, figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]):
        for result in results:
            times = [(size, seconds_of(result, case, k)) for case, size in sizes.items()]
            points = sorted((size, size / seconds) for size, seconds in times if seconds)
            name = result["configuration"]["algorithm"]
            style = {"linestyle": "--", "color": "black"} if name == LIMIT else {}
            xs, ys = [size for size, _ in points], [rate for _, rate in points]
            panel.plot(xs, ys, marker=".", label=name, **style)
        panel.set(title=f"k = {k}", xlabel="bytes per device", xscale="log", yscale="log")
        panel.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("bytes / second")
    handles = figure.axes[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize="small")
    figure.savefig(directory / "exchange.png", dpi=120)


def measure_exchange(
    algorithm: str, models: list[str], sizes: list[int], ks: list[int], seconds: float
) -> dict[str, Any]:
    """For every case `bytes` and `num_tensors` of a device, and seconds of a call for each k."""
    cases = cases_of(sizes, [make_model(name) for name in models])
    available = gpus() or [torch.device("cpu")]
    measured: dict[str, Any] = {}
    for case, shapes in cases.items():
        num_bytes = sum(4 * shape.numel() for shape in shapes)
        measured[case] = {"num_tensors": len(shapes), "bytes": num_bytes}
        for k in ks:
            devices = [available[i % len(available)] for i in range(k)]
            measured[case][k] = time_function(algorithm, shapes, devices, seconds)
    return measured


if __name__ == "__main__":
    print_result(measure_exchange)
