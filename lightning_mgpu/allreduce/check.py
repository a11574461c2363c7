"""The contract of an allreduce, as a type and as a check of your own function."""

import pydoc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_mgpu.allreduce.plan import run_plan
from lightning_mgpu.allreduce.record import record

WRITTEN = (
    "as written (there `.to(device)` copies only from a different device: .clone() its result "
    "before you write to it, or use as_written=false)"
)
Allreduce = Callable[[list[Tensor]], None]
"""Overwrites k >= 1 tensors of one shape, one per device, with their sum.

Results are bitwise identical on every device and in every call, for any shape (empty, not divisible
by k), strides and floating-point dtype. The functions of this package also accept 0-d tensors;
yours need not.

A function with the attribute `elementwise = True` may be called on any slice of a flat row of
gradients: it sums every element in the same order, so results are bitwise identical. A function
with the attribute `powers_of_two = True` is called only with k = 1, 2, 4, 8, ..."""


def find_allreduce(name: str) -> Allreduce:
    """An allreduce of this package by its short name, or yours by its dotted path.

    Raises:
        ValueError: If no such function exists.
    """
    function = pydoc.locate(f"{__package__}.{name}_allreduce") or pydoc.locate(name)
    if not callable(function):
        names = "textbook, key_value, tree, sharded, ring, halving_doubling"
        raise ValueError(f"no allreduce {name!r}: use {names}, or a path, my_module.my_allreduce")
    return function


def counts_to_check(allreduce: Allreduce, k: int) -> list[int]:
    """Numbers of devices to check: k, 3 and 4. With two, the order of a sum does not matter."""
    powers_of_two = getattr(allreduce, "powers_of_two", False)
    return sorted({k, 4} if powers_of_two else {k, 3, 4})


def check_allreduce(
    allreduce: Allreduce, devices: Sequence[torch.device], as_written: bool = False
) -> None:
    """Verify that `allreduce` satisfies the contract, on small tensors on each of `devices`.

    Args:
        as_written: Also run its plan on them, and compare the results bitwise.

    Raises:
        ValueError: Names the device, its result and the expected result.
    """
    name = repr(allreduce)
    if hasattr(allreduce, "__qualname__"):
        name = f"{allreduce.__module__}.{allreduce.__qualname__}"
    name = f"allreduce {name} of {len(devices)} tensors"
    for inputs in _cases(devices):
        result, again = (_call(name, allreduce, inputs, devices) for _ in range(2))
        others = {"on device 0": [result[0]] * len(devices), "when called again": again}
        if getattr(allreduce, "elementwise", False):
            halves = zip(*(x.flatten().chunk(2) for x in inputs))
            parts = [_call(name, allreduce, [*half], devices) for half in halves]
            others["on slices (`elementwise`)"] = [torch.cat(part) for part in zip(*parts)]
        if as_written:
            tensors = [x.to(device, copy=True) for x, device in zip(inputs, devices)]
            run_plan(record(allreduce, len(devices), inputs[0]), tensors)
            others[WRITTEN] = [t.cpu() for t in tensors]
        for where, expected in others.items():
            for i, (found, other) in enumerate(zip(result, expected)):
                if (differs := found != other.view_as(found)).any():
                    values = _show(found, differs), _show(other.view_as(found), differs)
                    raise ValueError(
                        f"{name} left device {i} ({devices[i]}) with {values[0]}, but {values[1]} "
                        f"{where}; results must be bitwise identical on all devices and in every "
                        "call"
                    )


def _cases(devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """The inputs of successive calls, on the CPU; the first ones give the clearest message."""
    k = len(devices)
    # a separate generator, which does not change the global RNG
    generator = torch.Generator().manual_seed(0)
    # every subset of up to 20 devices has a different sum, exact in float32
    cases = [[torch.tensor([1.0, 2.0]) * 2 ** (i % 20) for i in range(k)]]
    dtypes = [torch.float32, torch.float64]  # float64 shows a sum that was computed in float32
    if any(device.type == "mps" for device in devices):
        dtypes = [torch.float32]  # Apple GPUs do not support float64
    for dtype in dtypes:
        for shape in ((2 * k + 1,), (3, 5), (0,), (1,), (5003,)):
            cases.append([torch.randn(shape, generator=generator, dtype=dtype) for _ in devices])
        # strides as in the gradient of a channels_last convolution: not contiguous
        cases.append([torch.randn(5, 3, generator=generator, dtype=dtype).t() for _ in devices])
    return cases


def _call(
    name: str, allreduce: Allreduce, inputs: list[Tensor], devices: Sequence[torch.device]
) -> list[Tensor]:
    """Call `allreduce` on copies of the inputs; returns the verified sums, on the CPU."""
    x, terms = inputs[0], torch.stack(inputs).double()
    where = f"tensors of shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}"
    tensors = [x.to(device, copy=True) for x, device in zip(inputs, devices)]
    # rebinding a list's slot, or the memory of a tensor, does not change these
    memory = [t.detach() for t in tensors]
    try:
        allreduce(tensors)
    except Exception as error:
        text = f"{type(error).__name__} ({where}): {' '.join(str(error).split())}"
        raise ValueError(f"{name} raised {text}") from error
    results, exact = [t.cpu() for t in memory], terms.sum(0)
    rounding = 2 * len(inputs) * torch.finfo(x.dtype).eps * terms.abs().sum(0)
    for i, (device, result) in enumerate(zip(devices, results)):
        # also for NaN
        if (is_wrong := ~((result.double() - exact).abs() <= rounding)).any():
            total = _show(exact.to(x.dtype), is_wrong)
            raise ValueError(
                f"{name} left device {i} ({device}) with {_show(result, is_wrong)} instead of the "
                f"sum {total} ({where}); it must write into the tensors it receives "
                "(tensors[i].copy_(...)), not into copies, and not rebind the list's slots"
            )
    return results


def _show(values: Tensor, is_wrong: Tensor) -> str:
    """All of a small tensor, else the first wrong values, with digits that distinguish floats."""
    values = values if values.numel() <= 4 else values[is_wrong][:4]
    digits = 17 if values.dtype == torch.float64 else 9
    return str([float(f"{v:.{digits}g}") for v in values.flatten().tolist()])
