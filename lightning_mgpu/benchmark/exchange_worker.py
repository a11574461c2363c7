"""Times an allreduce function alone, on tensors of several sizes and on the gradients of models.

`exchange.py` starts it as a process for every function: OpenMP's threads of a compiled one slow down those after it.
"""

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import Allreduce, allreduce_many
from lightning_mgpu.benchmark.parts import finished_time
from lightning_mgpu.benchmark.plan import make_model

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


def cases_of(sizes: Sequence[int], models: Sequence[nn.Module]) -> dict[str, list[torch.Size]]:
    """Shapes of the gradients to exchange, by what they are: `4 kB`, `LeNet`, `LeNet, flat`.

    `flat` is what `gradient_as_bucket_view` does: the same bytes in one tensor a device.
    """
    cases = {f"{size / 2**10:.4g} kB": [torch.Size([size // 4])] for size in sizes if size < 2**20}
    cases |= {f"{size / 2**20:.4g} MB": [torch.Size([size // 4])] for size in sizes if size >= 2**20}
    for model in models:
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
        cases[type(model).__name__] = shapes
        cases[f"{type(model).__name__}, flat"] = [torch.Size([sum(shape.numel() for shape in shapes)])]
    return cases


@torch.no_grad()
def read_modify_write(gradients: list[list[Tensor]]) -> None:
    for same in gradients:
        for tensor in same:
            tensor.add_(0.0)  # zeros stay zeros: a sum of sums of sums would end as inf


def time_function(name: str, shapes: Sequence[torch.Size], devices: Sequence[torch.device], seconds: float) -> float:
    """Seconds of a call on float32 gradients of these shapes, measured for so many `seconds`."""
    from torch.utils.benchmark import Timer  # which says that there is no CUDA: only where it is needed

    gradients = [[torch.zeros(*shape, device=device) for device in devices] for shape in shapes]
    call: Callable[[], None] = functools.partial(read_modify_write, gradients)
    if name != LIMIT:
        call = functools.partial(allreduce_many, find_algorithm(name), gradients)
    call()  # compiles, allocates
    timer = Timer("call()", globals={"call": call}, timer=finished_time, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


def main() -> None:
    order = json.loads(sys.argv[1])
    cases = cases_of(order["sizes"], [make_model(name) for name in order["models"]])
    num_gpus = torch.cuda.device_count()
    found = []
    for case, shapes in cases.items():
        about = {"case": case, "num_tensors": len(shapes), "bytes": sum(4 * shape.numel() for shape in shapes)}
        for k in order["ks"]:
            devices = [torch.device("cuda", i % num_gpus) if num_gpus else torch.device("cpu") for i in range(k)]
            found.append(
                {**about, "k": k, "seconds": time_function(order["algorithm"], shapes, devices, order["seconds"])}
            )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
