"""The allreduce functions alone: tables and a picture, beside what memory does with the same bytes.

Each function is timed in a process of its own (`main`): a compiled one's OpenMP threads slow all.
"""

import functools
import importlib
import json
import sys
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
from lightning_mgpu.benchmark.processes import Result
from lightning_mgpu.benchmark.report import markdown, not_measured, over_repeats
from lightning_mgpu.devices import gpus
from lightning_mgpu.errors import UsageError

ALGORITHMS: dict[str, Allreduce] = {
    name: getattr(allreduce, f"{name}_allreduce")
    for name in ("textbook", "tree", "sharded", "ring", "blocked", "foreach", "compiled")
}
LIMIT = "read-modify-write"
"""No allreduce but what memory can do with the same bytes: `t.add_` on each of the k tensors."""


def find_algorithm(name: str) -> Allreduce:
    """An allreduce by its name or its dotted path."""
    module, _, attribute = name.rpartition(".")
    return ALGORITHMS.get(name) or getattr(importlib.import_module(module), attribute)


def check_algorithm(name: str) -> None:
    """Find an allreduce and try its sums."""
    try:
        check_allreduce(find_algorithm(name), 3 * [torch.device("cpu")])
    except (ImportError, AttributeError, ValueError) as error:
        known = (
            f"choose from {', '.join(ALGORITHMS)}, or give a dotted path, my_module.my_allreduce"
        )
        raise UsageError(f"--algorithms {name}: {error}; {known}") from error


def cases_of(sizes: Sequence[int], models: Sequence[nn.Module]) -> dict[str, list[torch.Size]]:
    """Shapes of the gradients to exchange, by what they are: `4 kB`, `LeNet`, `LeNet, flat`.

    `flat` is what `gradient_as_bucket_view` does: the same bytes in one tensor a device.
    """
    cases = {f"{size / 2**10:.4g} kB": [torch.Size([size // 4])] for size in sizes if size < 2**20}
    cases |= {
        f"{size / 2**20:.4g} MB": [torch.Size([size // 4])] for size in sizes if size >= 2**20
    }
    for model in models:
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
        name, total = type(model).__name__, sum(shape.numel() for shape in shapes)
        cases |= {name: shapes, f"{name}, flat": [torch.Size([total])]}
    return cases


@torch.no_grad()
def read_modify_write(gradients: list[list[Tensor]]) -> None:
    for same in gradients:
        for tensor in same:
            tensor.add_(0.0)  # zeros stay zeros: a sum of sums of sums would end as inf


def time_function(
    name: str, shapes: Sequence[torch.Size], devices: Sequence[torch.device], seconds: float
) -> float:
    """Seconds of a call on float32 gradients of these shapes, measured for so many `seconds`."""
    # which says that there is no CUDA: only where it is needed
    from torch.utils.benchmark import Timer

    gradients = [[torch.zeros(*shape, device=device) for device in devices] for shape in shapes]
    call: Callable[[], None] = functools.partial(read_modify_write, gradients)
    if name != LIMIT:
        call = functools.partial(allreduce_many, find_algorithm(name), gradients)
    call()  # compiles, allocates
    clock, num_threads = finished_clock(devices), torch.get_num_threads()
    timer = Timer("call()", globals={"call": call}, timer=clock, num_threads=num_threads)
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def seconds_of(result: Result, case: str, k: int) -> float | None:
    """The median of a call; `None` where nothing was measured."""
    return over_repeats(lambda this: this[case][str(k)], result)


def exchange_tables(results: Sequence[Result]) -> list[str]:
    """For every case a table: milliseconds, and speed beside the textbook's and the memory's."""
    by_name = {result["configuration"]["algorithm"]: result for result in results}
    lines = []
    for case in cases_measured(results):
        ks = results[0]["configuration"]["ks"]
        rows = [["", *(head for k in ks for head in (f"k = {k}, ms", "/ textbook", "/ limit"))]]
        for name, result in by_name.items():
            cells = [name]
            for k in ks:
                seconds = seconds_of(result, case, k)
                cells.append("" if seconds is None else f"{seconds * 1e3:.3f}")
                cells += [
                    _times(result, by_name.get(other), case, k) for other in ("textbook", LIMIT)
                ]
            rows.append(cells)
        lines += markdown(f"The allreduce alone: {case}", rows[0], rows[1:])
    return [*lines, *not_measured(results)]


def _times(result: Result, other: Result | None, case: str, k: int) -> str:
    times = over_repeats(
        lambda this, other: other[case][str(k)] / this[case][str(k)], result, other
    )
    return "" if times is None else f"{times:.2f}"


def cases_measured(results: Sequence[Result]) -> dict[str, Any]:
    """What the first process that has ended found in each case."""
    return next((repeat for result in results for repeat in result["repeats"] if repeat), {})


def plot_exchange(results: Sequence[Result], directory: Path) -> None:
    """`exchange.png`, bandwidth by size of a device's tensor: a panel a k, a line an algorithm."""
    found = cases_measured(results)
    single = {case: each["bytes"] for case, each in found.items() if each["num_tensors"] == 1}
    if not single:
        return
    ks = results[0]["configuration"]["ks"]
    figure = Figure(figsize=(4.5 * len(ks) + 1.5, 4), layout="constrained")
    for k, panel in zip(ks, figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]):
        for result in results:
            seconds = {case: seconds_of(result, case, k) for case in single}
            points = sorted(
                (size, size / its) for case, size in single.items() if (its := seconds[case])
            )
            name = result["configuration"]["algorithm"]
            style = {"linestyle": "--", "color": "black"} if name == LIMIT else {}
            xs, ys = [size for size, _ in points], [rate for _, rate in points]
            panel.plot(xs, ys, marker=".", label=name, **style)
        panel.set(title=f"k = {k}", xlabel="bytes a device", xscale="log", yscale="log")
        panel.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("bytes / second")
    handles = figure.axes[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize="small")
    figure.savefig(directory / "exchange.png", dpi=120)


def main() -> None:
    """Print of every case `bytes` and `num_tensors` a device, and a call's seconds for each k."""
    order = json.loads(sys.argv[1])
    cases = cases_of(order["sizes"], [make_model(name) for name in order["models"]])
    those = gpus() or [torch.device("cpu")]
    found: dict[str, Any] = {}
    for case, shapes in cases.items():
        num_bytes = sum(4 * shape.numel() for shape in shapes)
        found[case] = {"num_tensors": len(shapes), "bytes": num_bytes}
        for k in order["ks"]:
            devices = [those[i % len(those)] for i in range(k)]
            found[case][k] = time_function(order["algorithm"], shapes, devices, order["seconds"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
