"""The allreduce functions alone: bandwidth against size, beside memory's own limit and torch.distributed.

    python -m lightning_mgpu.benchmark.exchange --quick
    python -m lightning_mgpu.benchmark.exchange --ks 2 4 8 --json exchange.json --picture exchange.png

Every algorithm takes its turn in each repetition, so that a drifting machine favours none. Two rows are no allreduce
but what memory can do with the same bytes: `copy` reads all k tensors and writes them elsewhere, `read-modify-write`
is `t.add_` on each. Bandwidths are those of nccl-tests: bytes / seconds, and, for comparing different k, 2(k-1)/k times
that.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import Allreduce, allreduce_many
from lightning_mgpu.benchmark.cores import free_memory, num_cores
from lightning_mgpu.benchmark.exchange_processes import measure_processes
from lightning_mgpu.benchmark.exchange_report import plot_exchange, result, size_text, table
from lightning_mgpu.runs.devices import synchronize

ALGORITHMS: dict[str, Allreduce] = {
    name: getattr(allreduce, f"{name}_allreduce")
    for name in ("textbook", "tree", "sharded", "ring", "blocked", "foreach", "compiled")
}
SIZES = [4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 100 * 2**20, 400 * 10**6]  # bytes a device
QUICK_SIZES = [4 * 2**10, 256 * 2**10, 4 * 2**20]
CPU = (torch.device("cpu"),)

Progress = Callable[[str], None]


def measure_exchange(
    algorithms: Mapping[str, Allreduce],
    sizes: Sequence[int],
    ks: Sequence[int],
    seconds: float,
    *,
    devices: Sequence[torch.device] = CPU,
    progress: Progress = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
    free_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Measure every algorithm on k float32 tensors of each size.

    Args:
        sizes: Bytes of one of the k tensors.
        seconds: For each algorithm, k and size; at least three repetitions are made.
        devices: Replica i is on `devices[i % len(devices)]`.
        progress: Told what comes next.
        free_bytes: Sizes whose tensors, and their copies, need more than half of it are skipped; left out, the memory
            that is free.

    Returns:
        For each algorithm, k and size `result`'s row; for what was skipped a row that says why under `skipped`.
    """
    rows = []
    for k in ks:
        for num_bytes in sizes:
            shapes = [torch.Size([num_bytes // 4])]
            calls = {name: (lambda g, f=f: f(list(g[0]))) for name, f in algorithms.items()}
            rows += _measure(calls, shapes, k, seconds, devices, progress, clock, free_bytes)
    return rows


def measure_gradients(
    algorithms: Mapping[str, Allreduce],
    shapes: Sequence[torch.Size],
    ks: Sequence[int],
    seconds: float,
    *,
    devices: Sequence[torch.device] = CPU,
    progress: Progress = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
    free_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """As `measure_exchange`, on gradients of these shapes (see `model_gradients`), exchanged as a strategy does it.

    `NAME, flat` is with `gradient_as_bucket_view=True`: the same bytes in one tensor a device.
    """
    calls: dict[str, Callable[[list[list[Tensor]]], None]] = {
        name: (lambda g, f=f: allreduce_many(f, [list(same) for same in g]))  # type: ignore[misc]
        for name, f in algorithms.items()
    }
    rows = []
    for k in ks:
        flat = [torch.zeros(sum(s.numel() for s in shapes), device=d) for d in islice(cycle(devices), k)]
        calls |= {f"{name}, flat": _with_these(allreduce, flat) for name, allreduce in algorithms.items()}
        rows += _measure(calls, shapes, k, seconds, devices, progress, clock, free_bytes)
    return rows


def _with_these(allreduce: Allreduce, tensors: list[Tensor]) -> Callable[[list[list[Tensor]]], None]:
    return lambda gradients: allreduce_many(allreduce, [list(tensors)])


def model_gradients(model: nn.Module) -> list[torch.Size]:
    """The shapes of the model's gradients."""
    return [p.shape for p in model.parameters() if p.requires_grad]


def _measure(
    calls: Mapping[str, Callable[[list[list[Tensor]]], None]],
    shapes: Sequence[torch.Size],
    k: int,
    seconds: float,
    devices: Sequence[torch.device],
    progress: Progress,
    clock: Callable[[], float],
    free_bytes: int | None,
) -> list[dict[str, Any]]:
    """Rows of all `calls`, which take for every shape k tensors, and of the two limits."""
    where = list(islice(cycle(devices), k))
    num_bytes = sum(4 * shape.numel() for shape in shapes)
    free, needed = free_memory(where) if free_bytes is None else free_bytes, 2 * k * num_bytes
    if needed > free / 2:
        why = f"needs {needed / 2**20:.0f} MiB, more than half of the {free / 2**20:.0f} MiB that are free"
        progress(f"k = {k}, {size_text(num_bytes)}: skipped, {why}")
        return [{"algorithm": name, "k": k, "bytes": num_bytes, "skipped": why} for name in (*calls, *LIMITS)]
    progress(f"k = {k}, {size_text(num_bytes)}")
    gradients = [[torch.empty(shape, device=device).fill_(0.0) for device in where] for shape in shapes]
    spare = [[torch.empty_like(t).fill_(0.0) for t in same] for same in gradients]
    all_calls = {name: (lambda call=call: call(gradients)) for name, call in calls.items()}
    all_calls |= {name: (lambda limit=limit: limit(gradients, spare)) for name, limit in LIMITS.items()}
    times = interleave(all_calls, seconds, lambda: synchronize(where), clock)
    return [result(name, k, num_bytes, t) for name, t in times.items()]


@torch.no_grad()
def _copy(gradients: list[list[Tensor]], spare: list[list[Tensor]]) -> None:
    for same, others in zip(gradients, spare, strict=True):
        for t, other in zip(same, others, strict=True):
            other.copy_(t)


@torch.no_grad()
def _read_modify_write(gradients: list[list[Tensor]], spare: list[list[Tensor]]) -> None:
    for same in gradients:
        for t in same:
            t.add_(0.0)  # zeros stay zeros: a sum of sums of sums would end as inf


LIMITS = {"copy": _copy, "read-modify-write": _read_modify_write}


def interleave(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each of `calls`, in turns after a warm-up, until `seconds` for each are over; at least three each.

    Whoever follows finds the caches as the one before left them, so every repetition starts with another one.
    """
    for call in calls.values():
        call()
        call()
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    synchronize()
    end = clock() + seconds * len(names)
    repeat = 0
    while repeat < 3 or clock() < end:
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            synchronize()
            start = clock()
            calls[name]()
            synchronize()
            times[name].append(clock() - start)
        repeat += 1
    return times


def find_algorithm(name: str) -> tuple[str, Allreduce]:
    """An allreduce function by its name, or by the dotted path of one's own, whose sums are checked.

    Raises:
        argparse.ArgumentTypeError: If there is none.
    """
    if name in ALGORITHMS:
        return name, ALGORITHMS[name]
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
        allreduce.check_allreduce(found, 3 * CPU)
    except (ImportError, AttributeError, ValueError) as error:
        known = f"choose from {', '.join(ALGORITHMS)}, or give a dotted path, my_module.my_allreduce"
        raise argparse.ArgumentTypeError(f"{name}: {error}; {known}") from error
    return name, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes, k = 2; ends within 20 seconds on two cores")
    parser.add_argument("--ks", type=int, nargs="+", help="numbers of devices (2 4 8)")
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes a device (4 kB to 400 MB)")
    parser.add_argument("--seconds", type=float, help="for each algorithm, k and size (1)")
    named = f"of {', '.join(ALGORITHMS)}, or dotted paths of your own; left out: all of these"
    parser.add_argument("--algorithms", nargs="+", type=find_algorithm, help=named)
    parser.add_argument("--models", nargs="*", choices=["LeNet", "ResNet18"], help="also measure their gradients")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--picture", type=Path, help="write the picture here")
    args = parser.parse_args(arguments)
    for path in filter(None, (args.json, args.picture)):
        if not path.absolute().parent.is_dir():  # better now than after minutes
            parser.error(f"{path}: there is no directory {path.parent}")

    from lightning_mgpu import models  # Lightning: takes seconds to import

    quick = args.quick
    ks = args.ks or ([2] if quick else [2, 4, 8])
    sizes = args.sizes if args.sizes is not None else (QUICK_SIZES if quick else SIZES)
    seconds = args.seconds or (0.03 if quick else 1.0)
    names = args.models if args.models is not None else ["LeNet", "ResNet18"]
    algorithms = dict(args.algorithms) if args.algorithms else ALGORITHMS

    def progress(what: str) -> None:
        print(f"measuring {what}", flush=True)

    rows = measure_exchange(algorithms, sizes, ks, seconds, progress=progress)
    rows += measure_processes(sizes, ks, seconds, timeout=10 if quick else 300, progress=progress)
    print(f"\n{torch.get_num_threads()} threads on {num_cores()} cores, torch {torch.__version__}\n")
    print(table(sorted(rows, key=lambda row: (row["k"], row["bytes"]))), flush=True)
    gradients = {}
    for name in names:
        shapes = model_gradients(getattr(models, name)())
        print(f"\nGradients of {name}, {len(shapes)} tensors")
        gradients[name] = measure_gradients(algorithms, shapes, ks, seconds, progress=progress)
        print(table(gradients[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"exchange": rows, "gradients": gradients}, indent=1))
    if args.picture:
        plot_exchange(rows, args.picture)


if __name__ == "__main__":
    main()
