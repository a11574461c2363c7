"""Small things that the other files need: devices, replaced attributes, a weighted mean.

This file imports nothing of the package.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

MISSING = object()  # instead of a value, where `None` may be one

# Devices


def device_module(device: torch.device) -> Any:
    """`torch.cuda` for an NVIDIA or AMD GPU, `torch.mps` for Apple's, ...; `None` for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a device the thread's current one, on which kernels start. Apple has only one."""
    module = device_module(device)
    return module.device(device) if hasattr(module, "device") else nullcontext()


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it."""
    if device.type == "mps":
        torch.mps.synchronize()  # takes no device
    elif (module := device_module(device)) is not None:
        module.synchronize(device)


def gpus_first(replicas: Iterable[int], devices: Sequence[torch.device]) -> list[int]:
    """The order in which replicas start: GPUs compute while the CPU starts the next replica."""
    return sorted(replicas, key=lambda i: devices[i].type == "cpu")


def autocast_like(home: torch.device, device: torch.device) -> AbstractContextManager:
    """Autocast on a device, in the dtype that is in force on `home`, a device of another kind.

    torch has autocast per kind of device, and a precision plugin enters it only for `home`'s.
    """
    if device.type == home.type or not torch.is_autocast_enabled(home.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(home.type), cache_enabled=False)


def find_device(name: str | torch.device) -> torch.device:
    """A device by its name. One that this machine does not have is refused."""
    try:
        device = torch.device(name)
        module = device_module(device)
    except RuntimeError:
        raise MisconfigurationException(
            f"parallel_devices: {name!r} is not a device; 'cpu', 'cuda:0', ... are."
        ) from None
    if module is None:
        return device
    if (device.index or 0) >= (count := module.device_count()):
        raise MisconfigurationException(
            f"parallel_devices: there is no {name!r}; torch sees {count} "
            f"{device.type.upper()} device(s)."
        )
    return torch.device(device.type, device.index or 0)


# Attributes


@contextmanager
def replace_attributes(new: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects other attributes inside the block: (object, name, value)."""
    before = [(vars(owner), name, vars(owner).get(name, MISSING)) for owner, name, _ in new]
    for owner, name, value in new:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for namespace, name, value in before:
            namespace.pop(name, None)
            if value is not MISSING:
                namespace[name] = value


@contextmanager
def on_read(attribute: str, look: Callable[[Tensor], None], once: bool = False) -> Iterator[None]:
    """Inside the block `look(tensor)` is called before `tensor.<attribute>` is read."""
    itself: Any = getattr(torch._C.TensorBase, attribute)  # private: what `Tensor.grad` is

    def read(tensor: Tensor) -> Any:
        if once:
            restore()
        look(tensor)
        return itself.__get__(tensor)

    def restore() -> None:
        if attribute in vars(Tensor):
            delattr(Tensor, attribute)

    setattr(Tensor, attribute, property(read, itself.__set__, itself.__delete__))
    try:
        yield
    finally:
        restore()


def data_of(tensor: Tensor) -> Tensor:
    """`tensor.data`, which `on_read` does not see."""
    return torch._C.TensorBase.data.__get__(tensor)  # type: ignore[attr-defined]


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights. Equal numbers are not rounded."""
    if len(values) == 1 or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
        return values[0]
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights))
