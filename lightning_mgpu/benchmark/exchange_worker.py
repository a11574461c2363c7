"""Times allreduce functions in a process of their own, or torch.distributed's in several: `exchange.py` starts them."""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import Allreduce, allreduce_many
from lightning_mgpu.benchmark.parts import finished_time

ALGORITHMS: dict[str, Allreduce] = {
    name: getattr(allreduce, f"{name}_allreduce")
    for name in ("textbook", "tree", "sharded", "ring", "blocked", "foreach", "compiled")
}
LIMIT = "read-modify-write"
"""No allreduce but what memory can do with the same bytes: `t.add_` on each of the k tensors."""


def find_algorithm(name: str) -> Allreduce:
    """An allreduce by its name or its dotted path."""
    module, _, attribute = name.rpartition(".")
    return ALGORITHMS.get(name) or getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


@torch.no_grad()
def read_modify_write(gradients: list[list[Tensor]]) -> None:
    for same in gradients:
        for tensor in same:
            tensor.add_(0.0)  # zeros stay zeros: a sum of sums of sums would end as inf


def time_function(name: str, shapes: Sequence[Sequence[int]], devices: Sequence[torch.device], seconds: float) -> float:
    """Seconds of a call on float32 gradients of these shapes, measured for so many `seconds`."""
    from torch.utils.benchmark import Timer  # which says that there is no CUDA: only where it is needed

    gradients = [[torch.zeros(*shape, device=device) for device in devices] for shape in shapes]
    call: Callable[[], None] = functools.partial(read_modify_write, gradients)
    if name != LIMIT:
        call = functools.partial(allreduce_many, find_algorithm(name), gradients)
    call()  # compiles, allocates
    timer = Timer("call()", globals={"call": call}, timer=finished_time, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def time_distributed(tensor: Tensor) -> float:
    """Seconds of torch.distributed's allreduce: a mean over calls, as many for all processes."""
    num_calls = max(5, min(1000, 2**26 // tensor.nbytes))
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    start = finished_time()
    for _ in range(num_calls):
        dist.all_reduce(tensor)
    return (finished_time() - start) / num_calls


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    kind = "cuda" if order["accelerator"] == "gpu" else "cpu"
    rank = int(os.environ.get("LOCAL_RANK", -1))  # torchrun's
    if rank >= 0:
        backend = "nccl" if kind == "cuda" else "gloo"
        if kind == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend)
    num_devices = torch.cuda.device_count() if kind == "cuda" else 1
    devices = [torch.device(kind, i % num_devices) for i in range(order["k"])]
    for case, shapes in order["cases"].items():
        if rank >= 0:
            times = {backend: time_distributed(torch.zeros(*shapes[0], device=kind))}
        else:
            times = {name: time_function(name, shapes, devices, order["seconds"]) for name in order["names"]}
        if rank <= 0:
            print(json.dumps({"case": case, "times": times}), flush=True)
    if rank >= 0:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
