"""The contract of an allreduce, as a type and as a check of anybody's own function."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Allreduce = Callable[[list[Tensor]], None]
"""Turns k >= 1 tensors of one shape, one per device, into their sum.

It works in place. The sums are bit-identical on every device and at every call, for any shape
(empty, not divisible by k), any strides and any floating dtype. Those of this package take 0-d
tensors too. Yours need not: it gets views of one element."""


AllreduceMany = Callable[[list[list[Tensor]]], None]
"""Takes all gradients of a model at once, k for every parameter.

An allreduce may have such a function as its attribute `many` (see many.py). It does to each list
what an `Allreduce` does to one. The lists may differ in shape, layout and dtype."""


def check_allreduce(allreduce: Allreduce, devices: Sequence[torch.device]) -> None:
    """Call `allreduce` on small tensors, one for each of `devices`, and hold it to the contract.

    If it has a `many`, that is held to the same, on all of those tensors in one call.

    Raises:
        ValueError: One line that says which device got what, and what it should have got.
    """
    name = repr(allreduce)
    if hasattr(allreduce, "__qualname__"):
        name = f"{allreduce.__module__}.{allreduce.__qualname__}"
    for inputs in _cases(devices):
        _check(lambda gradients: allreduce(gradients[0]), name, [inputs], devices)
    many: AllreduceMany | None = getattr(allreduce, "many", None)
    if many is not None:
        _check(many, f"{name}.many", list(_cases(devices)), devices)
        _check(many, f"{name}.many", [], devices)  # a model whose parameters are all frozen


def _check(
    many: AllreduceMany, name: str, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> None:
    """Raise if `many` leaves no sums, other bits on another device, or other bits when repeated."""
    results, repeated = (_call(many, name, cases, devices) for _ in range(2))
    for result, again in zip(results, repeated, strict=True):
        for i, device in enumerate(devices):
            start = f"allreduce {name} left device {i} ({device}) with"
            differs = result[i] != result[0]
            if differs.any():
                values, expected = _show(result[i], differs), _show(result[0], differs)
                raise ValueError(
                    f"{start} {values} but device 0 with {expected}; replicas must be bit-identical"
                )
            differs = result[i] != again[i]
            if differs.any():
                values, expected = _show(result[i], differs), _show(again[i], differs)
                raise ValueError(
                    f"{start} {values}, and with {expected} when called again; it must be "
                    "deterministic"
                )


def _cases(devices: Sequence[torch.device]) -> Iterator[list[Tensor]]:
    """The inputs of one call after the other, on the CPU; the first make the clearest message."""
    k = len(devices)
    # a generator of our own leaves the run's random numbers as they are
    generator = torch.Generator().manual_seed(0)
    # every subset of devices has another sum
    yield [torch.tensor([1.0, 2.0]) * 2**i for i in range(k)]
    dtypes = [torch.float32, torch.float64]  # float64 shows a sum that was computed in float32
    if any(device.type == "mps" for device in devices):
        dtypes = [torch.float32]  # Apple GPUs have no other
    for dtype in dtypes:
        for shape in ((2 * k + 1,), (3, 5), (0,), (1,)):
            yield [torch.randn(shape, generator=generator, dtype=dtype) for _ in devices]
        # laid out in memory like the gradient of a channels_last convolution: not contiguous
        yield [torch.randn(5, 3, generator=generator, dtype=dtype).t() for _ in devices]


def _call(
    many: AllreduceMany, name: str, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """Call `many` on copies of the inputs on `devices`; returns the sums, checked, on the CPU."""
    copies = [
        [x.to(device, copy=True) for x, device in zip(inputs, devices, strict=True)]
        for inputs in cases
    ]
    addresses = [[t.data_ptr() for t in tensors] for tensors in copies]
    # `many` may put other tensors into its lists; those in `copies` must have changed
    lists = [list(tensors) for tensors in copies]
    try:
        many(list(lists))
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        where = f" (given {len(cases)} parameters)"
        if len(cases) == 1:
            where = f"{_where(cases[0])}{_hint(cases[0][0])}"
        raise ValueError(f"allreduce {name} raised {reason}{where}") from error
    results = []
    for inputs, tensors, before, after in zip(cases, copies, addresses, lists, strict=True):
        is_rebound = [id(t) for t in after] != [id(t) for t in tensors]
        results.append(_sums(name, inputs, tensors, before, is_rebound, devices))
    return results


def _sums(
    name: str,
    inputs: list[Tensor],
    tensors: list[Tensor],
    addresses: list[int],
    is_rebound: bool,
    devices: Sequence[torch.device],
) -> list[Tensor]:
    """`tensors` on the CPU. Raises unless each holds the sum of `inputs` at its old address."""
    x, k = inputs[0], len(inputs)
    where = _where(inputs)
    total = torch.stack(inputs).double().sum(0)
    rounding = 2 * k * torch.finfo(x.dtype).eps * torch.stack(inputs).double().abs().sum(0)
    results = []
    for i, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.data_ptr() != addresses[i]:
            raise ValueError(
                f"allreduce {name} gave the tensor of device {i} ({device}) other memory, shape or "
                f"dtype{where}; it must change the values in place (data[i].copy_(...))"
            )
        result = tensor.detach().cpu()
        is_wrong = ~((result.double() - total).abs() <= rounding)  # nan is wrong too
        if is_wrong.any():
            hint = "" if is_rebound else _hint(x)
            if not hint and (is_rebound or torch.equal(result, inputs[i])):
                hint = "; it must change the tensors in place (data[i].copy_(...)), not rebind "
                hint += "the list's slots"
            values, expected = _show(result, is_wrong), _show(total.to(x.dtype), is_wrong)
            raise ValueError(
                f"allreduce {name} left device {i} ({device}) with {values} instead of the sum "
                f"{expected}{where}{hint}"
            )
        results.append(result)
    return results


def _where(inputs: list[Tensor]) -> str:
    x = inputs[0]
    return f" (tensors of shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype})"


def _hint(x: Tensor) -> str:
    """What to write instead of the usual mistake for tensors like `x`."""
    if x.is_contiguous():
        return ""
    return (
        "; tensors need not be contiguous: view(-1) fails on this one, and reshape(-1) makes a "
        "copy of it"
    )


def _show(values: Tensor, is_wrong: Tensor) -> str:
    """All of a small tensor, else the first wrong values, with digits that tell floats apart."""
    values = values if values.numel() <= 4 else values[is_wrong][:4]
    digits = 17 if values.dtype == torch.float64 else 9
    return str([float(f"{v:.{digits}g}") for v in values.flatten().tolist()])
