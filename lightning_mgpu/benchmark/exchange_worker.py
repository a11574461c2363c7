"""Times allreduce functions in a process of their own, or torch.distributed's in several: `exchange.py` starts them.

Two of the calls are no allreduce but what memory can do with the same bytes: `copy` reads all k tensors and writes them
elsewhere, `read-modify-write` is `t.add_` on each.
"""

import functools
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import Allreduce, allreduce_many
from lightning_mgpu.benchmark.timing import finished_time

ALGORITHMS: dict[str, Allreduce] = {
    name: getattr(allreduce, f"{name}_allreduce")
    for name in ("textbook", "tree", "sharded", "ring", "blocked", "foreach", "compiled")
}
ROUNDS = 5

Gradients = list[list[Tensor]]
"""For every parameter, the k gradients of its replicas."""


def find_algorithm(name: str) -> Allreduce:
    """An allreduce by its name or its dotted path."""
    module, _, attribute = name.rpartition(".")
    return ALGORITHMS.get(name) or getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


@torch.no_grad()
def copy(elsewhere: Gradients, gradients: Gradients) -> None:
    for same, others in zip(gradients, elsewhere):
        for tensor, other in zip(same, others):
            other.copy_(tensor)


@torch.no_grad()
def read_modify_write(gradients: Gradients) -> None:
    for same in gradients:
        for tensor in same:
            tensor.add_(0.0)  # zeros stay zeros: a sum of sums of sums would end as inf


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float, clock: Callable[[], float] = finished_time
) -> dict[str, float]:
    """The median seconds of every call; they take turns, with `seconds` for each in all.

    Every round starts with another call, as a call finds the caches as the one before has left them.
    """
    from torch.utils.benchmark import Timer  # which says that there is no CUDA: only where it is needed

    names, times = list(calls), {name: list[float]() for name in calls}
    for call in calls.values():
        call()  # compiles, allocates
    for i in range(ROUNDS):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            timer = Timer("call()", globals={"call": calls[name]}, timer=clock, num_threads=torch.get_num_threads())
            times[name].append(timer.blocked_autorange(min_run_time=seconds / ROUNDS).median)
    return {name: statistics.median(each) for name, each in times.items()}


def time_functions(
    names: Sequence[str], shapes: Sequence[Sequence[int]], devices: Sequence[Any], seconds: float
) -> Any:
    """Seconds of each function on float32 gradients of these shapes."""
    gradients = [[torch.zeros(*shape, device=device) for device in devices] for shape in shapes]
    calls: dict[str, Callable[[], None]] = {}
    for name in names:
        if name == "copy":
            calls[name] = functools.partial(copy, [[torch.ones_like(t) for t in same] for same in gradients], gradients)
        elif name == "read-modify-write":
            calls[name] = functools.partial(read_modify_write, gradients)
        else:
            calls[name] = functools.partial(allreduce_many, find_algorithm(name), gradients)
    return time_in_turns(calls, seconds)


def time_distributed(tensor: Tensor, seconds: float) -> float:
    """Seconds of torch.distributed's allreduce: of each run those of the slowest process, of all runs the median."""

    def run() -> float:
        dist.barrier()
        start = finished_time()
        dist.all_reduce(tensor)
        return finished_time() - start

    guess = torch.tensor([run() for _ in range(3)][-1], device=tensor.device)
    dist.broadcast(guess, 0)  # all processes must make as many runs
    times = torch.tensor([run() for _ in range(max(5, min(10_000, int(seconds / guess.item()))))], device=tensor.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    kind = "cuda" if order["accelerator"] == "gpu" else "cpu"
    rank = int(os.environ.get("LOCAL_RANK", -1))  # torchrun's
    if rank >= 0:
        backend = "nccl" if kind == "cuda" else "gloo"
        if kind == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend)
    for case, shapes in order["cases"].items():
        if rank >= 0:
            [shape] = shapes
            times = {backend: time_distributed(torch.zeros(*shape, device=kind), order["seconds"])}
        else:
            num_devices = torch.cuda.device_count() if kind == "cuda" else 1
            devices = [torch.device(kind, i % num_devices) for i in range(order["k"])]
            times = time_functions(order["names"], shapes, devices, order["seconds"])
        if rank <= 0:
            print(json.dumps({"case": case, "times": times}), flush=True)
    if rank >= 0:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
