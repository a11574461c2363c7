"""Allreduce as one fused loop, by torch.compile's backend: replicas are read and written once."""

import threading
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lightning_mgpu.allreduce.blocked import blocked_allreduce
from lightning_mgpu.allreduce.flat import flattened
from lightning_mgpu.allreduce.foreach import foreach_many
from lightning_mgpu.allreduce.many import with_many

# Inductor adds half precision in float32: more exact, but other bits
DTYPES = (torch.float32, torch.float64)
# of the k tensors together: for less, a call of its own takes longer than it saves
MIN_BYTES = 4 * 2**20
MAX_TENSORS = 640  # in one kernel: more take too long to compile (a ResNet-18 on 8 devices has 608)

Kernel = Callable[[list[Tensor]], object]  # takes its list over and empties it
_compiling = threading.Lock()


def compiled_many(gradients: list[list[Tensor]]) -> None:
    """Every parameter's k gradients become their sum, in place; to the bit `textbook_allreduce`'s.

    All parameters are loops of one kernel with their sizes compiled in: one call per step.
    Compiling it takes seconds, once for each model and k. If a model has very many parameters,
    `foreach_many` sums the small ones, and each large one is a call of `compiled_allreduce`.
    """
    tensors = [t for same in gradients for t in same]
    if len(gradients) < len(tensors) <= MAX_TENSORS and _fit(tensors):  # k > 1
        sizes = tuple([same[0].shape for same in gradients])
        _run(_kernel(len(gradients[0]), sizes, tensors[0].dtype, torch.get_num_threads()), tensors)
        return
    foreach_many([same for same in gradients if _is_small(same)])
    for same in gradients:
        if not _is_small(same):
            compiled_allreduce(same)


@with_many(compiled_many)
@torch.no_grad()
def compiled_allreduce(tensors: list[Tensor]) -> None:
    """Add up k tensors by element and store each sum k times, in place, in one loop over all cores.

    Reads k n bytes and writes k n, as `t.add_(1)` on each of them does: within one memory no
    allreduce can do less. The textbook reads and writes device 0's sum again for each further one.

    The kernel for any size is compiled at the first call, once for each k and dtype; torch keeps it
    on disk. Small tensors, half precision, strides with holes and tensors that are not on the CPU,
    which have no loop in common, are left to `blocked_allreduce`: the same sums to the bit.

    Raises:
        RuntimeError: If the kernel cannot be compiled, as without a C++ compiler: what to install.
    """
    if len(tensors) == 1 or _is_small(tensors):
        blocked_allreduce(tensors)
        return
    with flattened(tensors) as flat:
        if _fit(flat):
            _run(_kernel(len(flat), None, flat[0].dtype, torch.get_num_threads()), flat)
        else:
            blocked_allreduce(flat)


def _is_small(tensors: list[Tensor]) -> bool:
    return len(tensors) * tensors[0].nbytes < MIN_BYTES


def _fit(tensors: list[Tensor]) -> bool:
    """Whether one kernel can take them all."""
    dtype = tensors[0].dtype
    fit = [t.dtype is dtype and t.is_cpu and t.is_contiguous() for t in tensors]
    return dtype in DTYPES and all(fit)  # not of a generator, which is slower


def _run(kernel: Kernel, tensors: list[Tensor]) -> None:
    torch.autograd.graph.increment_version(tensors)  # autograd does not see what the kernel writes
    kernel(list(tensors))


@lru_cache(maxsize=64)
def _kernel(
    k: int, sizes: tuple[torch.Size, ...] | None, dtype: torch.dtype, num_threads: int
) -> Kernel:
    """The loop over parameters of these sizes, or, without sizes, over a 1-d parameter of any size.

    torch.compile's own call checks every tensor in Python before it runs, 0.03 to 0.1 ms, as long
    as LeNet's whole allreduce takes; so its backend (Inductor) is called directly, and `lru_cache`
    finds the kernel. Inductor writes `num_threads`, torch's setting, into the kernel.
    """
    from torch._inductor.compile_fx import compile_fx_inner  # takes seconds to import
    from torch.fx.experimental.proxy_tensor import make_fx

    def add_up(*tensors: Tensor) -> tuple[()]:
        for i in range(0, len(tensors), k):
            total, *others = tensors[i : i + k]
            for other in others:
                total = total + other  # in the textbook's order
            for t in tensors[i : i + k]:
                t.copy_(total)
        return ()

    with _compiling, torch.inference_mode(False), torch.no_grad():
        examples = [
            torch.empty(size, dtype=dtype)
            for size in sizes or (torch.Size([2**20]),)
            for _ in range(k)
        ]
        graph = make_fx(add_up, tracing_mode="fake" if sizes else "symbolic")(*examples)
        try:
            return compile_fx_inner(
                graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
            )
        except Exception as error:
            raise RuntimeError(
                "compiled_allreduce could not compile its kernel. It needs a C++ compiler, g++ or "
                "what $CXX names (apt install g++, conda install gxx, or Xcode's command line "
                "tools); blocked_allreduce needs none. torch said: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
