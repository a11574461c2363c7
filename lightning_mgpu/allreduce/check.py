"""The contract of an allreduce, as a type and as a check of anybody's own function."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Allreduce = Callable[[list[Tensor]], None]
"""k >= 1 tensors of one shape, one a device, become their sum: in place, bit-identical on every device and at every
call, for any shape (0-d, empty, not divisible by k), any strides and any floating dtype."""


def check_allreduce(allreduce: Allreduce, devices: Sequence[torch.device]) -> None:
    """Call `allreduce` on a few small tensors, one for each of `devices`, and hold the result to the contract.

    Raises:
        ValueError: one line that says which device got what, and what it should have got.
    """
    name = f"{allreduce.__module__}.{allreduce.__qualname__}" if hasattr(allreduce, "__qualname__") else repr(allreduce)
    for inputs in _cases(devices):
        results, repeated = (_call(allreduce, name, inputs, devices) for _ in range(2))
        for i, device in enumerate(devices):
            left = f"allreduce {name} left device {i} ({device}) with"
            differs = results[i] != results[0]
            if differs.any():
                got, expected = _show(results[i], differs), _show(results[0], differs)
                raise ValueError(f"{left} {got} but device 0 with {expected}; replicas must be bit-identical")
            differs = results[i] != repeated[i]
            if differs.any():
                got, then = _show(results[i], differs), _show(repeated[i], differs)
                raise ValueError(f"{left} {got}, and with {then} when called again; it must be deterministic")


def _cases(devices: Sequence[torch.device]) -> Iterator[list[Tensor]]:
    """The inputs of one call after the other, on the CPU; the first ones make the most readable message."""
    k = len(devices)
    generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers stay as they are
    yield [torch.tensor([1.0, 2.0]) * 2**i for i in range(k)]  # every subset of devices has another sum
    dtypes = [torch.float32, torch.float64]  # float64 shows a sum that was made in less
    if any(device.type == "mps" for device in devices):
        dtypes = [torch.float32]  # all that Apple GPUs have
    for dtype in dtypes:
        for shape in ((2 * k + 1,), (3, 5), (0,), ()):
            yield [torch.randn(shape, generator=generator, dtype=dtype) for _ in devices]
        # laid out in memory like the gradient of a channels_last convolution: not contiguous
        yield [torch.randn(5, 3, generator=generator, dtype=dtype).t() for _ in devices]


def _call(allreduce: Allreduce, name: str, inputs: list[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """What `allreduce` makes of copies of `inputs` on `devices`, once it is known to be the sum; on the CPU."""
    x, k = inputs[0], len(inputs)
    where = f" (tensors of shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype})"
    tensors = [x.to(device, copy=True) for x, device in zip(inputs, devices, strict=True)]
    memory = [t.data_ptr() for t in tensors]
    slots = list(tensors)  # the function may put other tensors in here: `tensors` shows that ours did not change
    try:
        allreduce(slots)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"allreduce {name} raised {reason}{where}{_hint(x)}") from error

    total = torch.stack(inputs).double().sum(0)
    rounding = 2 * k * torch.finfo(x.dtype).eps * torch.stack(inputs).double().abs().sum(0)
    results = []
    for i, (tensor, device) in enumerate(zip(tensors, devices, strict=True)):
        if tensor.shape != x.shape or tensor.dtype != x.dtype or tensor.data_ptr() != memory[i]:
            raise ValueError(
                f"allreduce {name} gave the tensor of device {i} ({device}) other memory, shape or dtype{where}; "
                "it must change the values in place (data[i].copy_(...))"
            )
        result = tensor.detach().cpu()
        wrong = ~((result.double() - total).abs() <= rounding)  # nan is wrong too
        if wrong.any():
            rebound = [id(s) for s in slots] != [id(t) for t in tensors]
            hint = "" if rebound else _hint(x)
            if not hint and (rebound or torch.equal(result, inputs[i])):
                hint = "; it must change the tensors in place (data[i].copy_(...)), not rebind the list's slots"
            got, expected = _show(result, wrong), _show(total.to(x.dtype), wrong)
            raise ValueError(
                f"allreduce {name} left device {i} ({device}) with {got} instead of the sum {expected}{where}{hint}"
            )
        results.append(result)
    return results


def _hint(x: Tensor) -> str:
    """What to write instead of the usual mistake for tensors like `x`."""
    if x.ndim == 0:
        return "; a 0-d tensor takes data[i].copy_(...) and data[i].add_(...), not data[i][:] = ..."
    if not x.is_contiguous():
        return "; tensors need not be contiguous: view(-1) fails on this one, and reshape(-1) makes a copy of it"
    return ""


def _show(values: Tensor, wrong: Tensor) -> str:
    """All of a small tensor, else the first few wrong values, with the digits that tell two floats apart."""
    values = values if values.numel() <= 4 else values[wrong][:4]
    digits = 17 if values.dtype == torch.float64 else 9
    return str([float(f"{v:.{digits}g}") for v in values.flatten().tolist()])
