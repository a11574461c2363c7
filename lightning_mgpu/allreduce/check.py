"""The contract of an allreduce, as a type and as a check of anybody's own function."""

import pydoc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Allreduce = Callable[[list[Tensor]], None]
"""Turns k >= 1 tensors of one shape, one per device, into their sum.

It works in place. The sums are bit-identical on every device and at every call, for any shape
(empty, not divisible by k), any strides and any floating dtype. Those of this package take 0-d
tensors too; yours need not."""

AllreduceMany = Callable[[list[list[Tensor]]], None]
"""Takes all gradients of a model at once: a list of k tensors for every parameter.

An allreduce may have such a function as its attribute `many`, which a strategy then calls instead,
once per step. It does to each list what the `Allreduce` does to one, with the same sums. The lists
may differ in shape, strides and dtype; there may be none at all."""


def allreduce_many(allreduce: Allreduce, gradients: list[list[Tensor]]) -> None:
    """Sum every parameter's k gradients: by `allreduce.many` if it has one, else one by one."""
    many: AllreduceMany | None = getattr(allreduce, "many", None)
    if many is not None:
        many(gradients)
    else:
        for tensors in gradients:
            allreduce(tensors)


def find_allreduce(name: str) -> Allreduce:
    """An allreduce of this package by its short name, or yours by its dotted path.

    Raises:
        ValueError: If there is none.
    """
    function = pydoc.locate(f"{__package__}.{name}_allreduce") or pydoc.locate(name)
    if not callable(function):
        names = "textbook, key_value, tree, sharded, ring, foreach"
        raise ValueError(f"no allreduce {name!r}: take {names}, or a path, my_module.my_allreduce")
    return function


def check_allreduce(allreduce: Allreduce, devices: Sequence[torch.device]) -> None:
    """Call `allreduce` on small tensors, one for each of `devices`, and hold it to the contract.

    If it has a `many`, that is held to the same, on all of those tensors in one call.

    Raises:
        ValueError: One line that says which device got what, and what it should have got.
    """
    name = repr(allreduce)
    if hasattr(allreduce, "__qualname__"):
        name = f"{allreduce.__module__}.{allreduce.__qualname__}"
    k = len(devices)
    cases = _cases(devices)
    for inputs in cases:
        _check(
            f"allreduce {name} of {k} tensors", lambda lists: allreduce(lists[0]), [inputs], devices
        )
    if hasattr(allreduce, "many"):
        for some in ([], cases):
            _check(f"allreduce {name}.many of {k} tensors", allreduce.many, some, devices)


def _cases(devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """The inputs of one call after the other, on the CPU; the first make the clearest message."""
    k = len(devices)
    # a generator of our own leaves the run's random numbers as they are
    generator = torch.Generator().manual_seed(0)
    # every subset of up to 20 devices has another sum, exact in float32
    cases = [[torch.tensor([1.0, 2.0]) * 2 ** (i % 20) for i in range(k)]]
    dtypes = [torch.float32, torch.float64]  # float64 shows a sum that was computed in float32
    if any(device.type == "mps" for device in devices):
        dtypes = [torch.float32]  # Apple GPUs have no other
    for dtype in dtypes:
        for shape in ((2 * k + 1,), (3, 5), (0,), (1,), (5003,)):
            cases.append([torch.randn(shape, generator=generator, dtype=dtype) for _ in devices])
        # laid out in memory like the gradient of a channels_last convolution: not contiguous
        cases.append([torch.randn(5, 3, generator=generator, dtype=dtype).t() for _ in devices])
    return cases


def _check(
    name: str, many: AllreduceMany, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> None:
    """Raise if `many` fails, leaves no sums, or leaves other bits on a device or at a 2nd call."""
    results, repeated = (_call(name, many, cases, devices) for _ in range(2))
    for result, again in zip(results, repeated):
        for i, device in enumerate(devices):
            for other, where in ((result[0], "on device 0"), (again[i], "when called again")):
                if (differs := result[i] != other).any():
                    values, others = _show(result[i], differs), _show(other, differs)
                    raise ValueError(
                        f"{name} left device {i} ({device}) with {values}, but {others} {where}; "
                        "the sums must be the same bits on all devices and at every call"
                    )


def _call(
    name: str, many: AllreduceMany, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """Call `many` on copies of the inputs on `devices`; returns the sums, checked, on the CPU."""
    copies = [[x.to(device, copy=True) for x, device in zip(xs, devices)] for xs in cases]
    # seen from here, a slot or a tensor that was given other memory has not changed
    memory = [[t.detach() for t in tensors] for tensors in copies]
    try:
        many(copies)
    except Exception as error:
        where = _where(cases[0][0]) if len(cases) == 1 else f"given {len(cases)} parameters"
        raise ValueError(
            f"{name} raised {type(error).__name__} ({where}): {' '.join(str(error).split())}"
        ) from error
    results = [[t.cpu() for t in tensors] for tensors in memory]
    for inputs, sums in zip(cases, results):
        x, terms = inputs[0], torch.stack(inputs).double()
        exact = terms.sum(0)
        rounding = 2 * len(inputs) * torch.finfo(x.dtype).eps * terms.abs().sum(0)
        for i, (device, result) in enumerate(zip(devices, sums)):
            # nan is wrong too
            if (is_wrong := ~((result.double() - exact).abs() <= rounding)).any():
                total = _show(exact.to(x.dtype), is_wrong)
                raise ValueError(
                    f"{name} left device {i} ({device}) with {_show(result, is_wrong)} instead of "
                    f"the sum {total} ({_where(x)}); it must write into the tensors it is given "
                    "(tensors[i].copy_(...)), not into copies, and not rebind the list's slots"
                )
    return results


def _where(x: Tensor) -> str:
    return f"tensors of shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}"


def _show(values: Tensor, is_wrong: Tensor) -> str:
    """All of a small tensor, else the first wrong values, with digits that tell floats apart."""
    values = values if values.numel() <= 4 else values[is_wrong][:4]
    digits = 17 if values.dtype == torch.float64 else 9
    return str([float(f"{v:.{digits}g}") for v in values.flatten().tolist()])
