"""The contract of an allreduce, as a type and as a check of anybody's own function."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Allreduce = Callable[[list[Tensor]], None]
"""k >= 1 tensors of one shape, one per device, become their sum: in place, bit-identical on every
device and at every call, for any shape (empty, not divisible by k), any strides and any floating
dtype. Those of this package take 0-d tensors too; one's own need not, it gets views of one
element."""


AllreduceMany = Callable[[list[list[Tensor]]], None]
"""An allreduce may have a function like this as its attribute `many` (see many.py). It takes all
gradients of a model at once, k for every parameter, and does to each list what an `Allreduce` does
to one. The lists may differ in shape, layout and dtype."""


def check_allreduce(allreduce: Allreduce, devices: Sequence[torch.device]) -> None:
    """Call `allreduce` on small tensors, one for each of `devices`, and hold it to the contract.

    If it has a `many`, that is held to the same, on all of those tensors in one call.

    Raises:
        ValueError: one line that says which device got what, and what it should have got.
    """
    name = (
        f"{allreduce.__module__}.{allreduce.__qualname__}"
        if hasattr(allreduce, "__qualname__")
        else repr(allreduce)
    )
    for inputs in _cases(devices):
        _check(lambda gradients: allreduce(gradients[0]), name, [inputs], devices)
    many: AllreduceMany | None = getattr(allreduce, "many", None)
    if many is not None:
        _check(many, f"{name}.many", list(_cases(devices)), devices)
        _check(many, f"{name}.many", [], devices)  # a model whose parameters are all frozen


def _check(
    many: AllreduceMany, name: str, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> None:
    results, repeated = (_call(many, name, cases, devices) for _ in range(2))
    for result, again in zip(results, repeated, strict=True):
        for i, device in enumerate(devices):
            left = f"allreduce {name} left device {i} ({device}) with"
            differs = result[i] != result[0]
            if differs.any():
                got, expected = _show(result[i], differs), _show(result[0], differs)
                raise ValueError(
                    f"{left} {got} but device 0 with {expected}; replicas must be bit-identical"
                )
            differs = result[i] != again[i]
            if differs.any():
                got, then = _show(result[i], differs), _show(again[i], differs)
                raise ValueError(
                    f"{left} {got}, and with {then} when called again; it must be deterministic"
                )


def _cases(devices: Sequence[torch.device]) -> Iterator[list[Tensor]]:
    """The inputs of one call after the other, on the CPU; the first make the clearest message."""
    k = len(devices)
    # its own: the run's random numbers stay as they are
    generator = torch.Generator().manual_seed(0)
    # every subset of devices has another sum
    yield [torch.tensor([1.0, 2.0]) * 2**i for i in range(k)]
    dtypes = [torch.float32, torch.float64]  # float64 shows a sum that was made in less
    if any(device.type == "mps" for device in devices):
        dtypes = [torch.float32]  # all that Apple GPUs have
    for dtype in dtypes:
        for shape in ((2 * k + 1,), (3, 5), (0,), (1,)):
            yield [torch.randn(shape, generator=generator, dtype=dtype) for _ in devices]
        # laid out in memory like the gradient of a channels_last convolution: not contiguous
        yield [torch.randn(5, 3, generator=generator, dtype=dtype).t() for _ in devices]


def _call(
    many: AllreduceMany, name: str, cases: list[list[Tensor]], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """What `many` makes of copies of the inputs on `devices`, once known to be sums; on the CPU."""
    copies = [
        [x.to(device, copy=True) for x, device in zip(inputs, devices, strict=True)]
        for inputs in cases
    ]
    memory = [[t.data_ptr() for t in tensors] for tensors in copies]
    # may get other tensors: `copies` shows that ours did not change
    slots = [list(tensors) for tensors in copies]
    try:
        many(list(slots))
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        what = (
            f"{_where(cases[0])}{_hint(cases[0][0])}"
            if len(cases) == 1
            else f" (given {len(cases)} parameters)"
        )
        raise ValueError(f"allreduce {name} raised {reason}{what}") from error
    return [
        _sums(
            name,
            inputs,
            tensors,
            before,
            [id(s) for s in slot] != [id(t) for t in tensors],
            devices,
        )
        for inputs, tensors, before, slot in zip(cases, copies, memory, slots, strict=True)
    ]


def _sums(
    name: str,
    inputs: list[Tensor],
    tensors: list[Tensor],
    memory: list[int],
    rebound: bool,
    devices: Sequence[torch.device],
) -> list[Tensor]:
    """`tensors` on the CPU, once each is known to be the sum of `inputs`, in the memory it had."""
    x, k = inputs[0], len(inputs)
    where = _where(inputs)
    total = torch.stack(inputs).double().sum(0)
    rounding = 2 * k * torch.finfo(x.dtype).eps * torch.stack(inputs).double().abs().sum(0)
    results = []
    for i, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.data_ptr() != memory[i]:
            raise ValueError(
                f"allreduce {name} gave the tensor of device {i} ({device}) other memory, shape or "
                f"dtype{where}; it must change the values in place (data[i].copy_(...))"
            )
        result = tensor.detach().cpu()
        wrong = ~((result.double() - total).abs() <= rounding)  # nan is wrong too
        if wrong.any():
            hint = "" if rebound else _hint(x)
            if not hint and (rebound or torch.equal(result, inputs[i])):
                hint = "; it must change the tensors in place (data[i].copy_(...)), not rebind "
                hint += "the list's slots"
            got, expected = _show(result, wrong), _show(total.to(x.dtype), wrong)
            raise ValueError(
                f"allreduce {name} left device {i} ({device}) with {got} instead of the sum "
                f"{expected}{where}{hint}"
            )
        results.append(result)
    return results


def _where(inputs: list[Tensor]) -> str:
    x = inputs[0]
    return f" (tensors of shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype})"


def _hint(x: Tensor) -> str:
    """What to write instead of the usual mistake for tensors like `x`."""
    if not x.is_contiguous():
        hint = (
            "; tensors need not be contiguous: view(-1) fails on this one, and reshape(-1) makes "
        )
        return hint + "a copy of it"
    return ""


def _show(values: Tensor, wrong: Tensor) -> str:
    """All of a small tensor, else the first wrong values, with digits that tell floats apart."""
    values = values if values.numel() <= 4 else values[wrong][:4]
    digits = 17 if values.dtype == torch.float64 else 9
    return str([float(f"{v:.{digits}g}") for v in values.flatten().tolist()])
