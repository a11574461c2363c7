"""Whether replicas hold the same bits. At most eight bytes of each tensor travel.

Tensors on one device are compared as they are, tensors on several devices by their digests.
The host waits once for all of them, if at all.
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20  # elements at once: a digest takes some 30 bytes of memory for each
MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)  # odd, as int64


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """64 bits that tell a tensor's values, in order, from others: a 0-d int64 tensor on its device.

    A sum of hashes (splitmix64) of each element's bits and its place. 0.0 and -0.0 are equal, and
    so are all NaNs. The shape and the strides do not matter.
    """
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for n, part in enumerate(tensor.detach().reshape(-1).split(CHUNK)):
        if part.is_floating_point() and part.element_size() > 1:
            part = torch.where(part.isnan(), torch.nan, part + 0)  # 0.0 of -0.0, and one NaN of all
        places = torch.arange(1, len(part) + 1, device=part.device) + n * CHUNK
        hashes = part.view(BITS[part.element_size()]) ^ (places * MIX[0])
        hashes = (hashes ^ (hashes >> 32)) * MIX[1]
        total = total + (hashes ^ (hashes >> 29)).sum()
    return total


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, element by element: a view, or a copy where it has gaps."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `reshape(-1)` may keep another stride, if there is only one element
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def digest_of_all(values: Iterable[Any]) -> int:
    """One number for all dense tensors among values, in order. The host waits for it."""
    are_dense = lambda t: isinstance(t, Tensor) and t.layout == torch.strided  # noqa: E731
    digests = [digest(value).cpu() for value in values if are_dense(value)]
    return int(digest(torch.stack(digests))) if digests else 0


def digest_batch(values: Iterable[Any], at_most: int = 2**62) -> list[int]:
    """What tells a batch from others: shapes, checksums of bytes, one of all texts and numbers.

    Of a dense tensor at most about so many elements count, in even steps. Of an object its tensors
    and arrays count.
    """
    plain: list[Any] = []
    arrays: list[Any] = []
    for value in values:
        if isinstance(value, (str, bytes, int, float)):
            plain.append(value)
        else:
            with suppress(Exception):  # of what pickle cannot take, what it has found before counts
                ArrayFinder(arrays).dump(value)
    found = []
    for array in arrays:
        found += array.shape
        if isinstance(array, Tensor):
            flat = array.reshape(-1)
            step = len(flat) // at_most | 1  # odd, so as not to meet the same columns of images
            array = bytes_of(flat[::step].cpu()).numpy()
        found.append(crc32(array.tobytes()))
    return [*found, crc32(repr(plain).encode())]


class ArrayFinder(pickle.Pickler):
    """Appends dense tensors and arrays of numbers to `found`, wherever they are in an object.

    Pickle takes objects apart, for example graphs and sparse tensors.
    """

    def __init__(self, found: list[Any]) -> None:
        super().__init__(BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.found = found

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_plain = value.layout == torch.strided and not value.is_nested
        else:
            is_plain = isinstance(value, np.ndarray) and value.dtype != object
        if not is_plain:
            return None  # to be taken apart
        self.found.append(value)
        return len(self.found)


@torch.no_grad()
def differences(sets: Sequence[Sequence[Tensor]]) -> Tensor:
    """Which of n sets of k tensors differ from the first of their set: bool, of shape (n, k).

    The result is on the first tensors' device. The host does not wait for it.
    """
    rows = []
    for first, *others in sets:
        row = [torch.zeros((), dtype=torch.bool, device=first.device)]
        is_spread = any(first.device != other.device for other in others)
        of_first: Any = digest(first) if is_spread else None
        for other in others:
            if first.device != other.device:
                row.append(of_first != digest(other).to(first.device))
            elif first.is_cpu and torch.equal(first, other):  # the fastest way
                row.append(row[0])
            else:
                are_nan = (first != first) & (other != other)
                row.append(((first != other) & ~are_nan).any())
        rows.append(torch.stack(row))
    return torch.stack([row.to(rows[0].device) for row in rows])


class Notes:
    """Warnings that a result may differ from one device's: each once, without waiting for a GPU."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._flags: dict[str, Tensor] = {}  # by the message: whether it is to be said

    def warn(self, message: str) -> None:
        """Warn, if this was not said before."""
        if message not in self._said:
            self._said.add(message)
            rank_zero_warn(message)

    def compare(self, message: str, tensors: Sequence[Tensor]) -> None:
        """Warn if tensors differ, when `flush` is called."""
        if message not in self._said:
            self.flag(message, differences([tensors]).any())

    def flag(self, message: str, is_true: Tensor) -> None:
        """Warn if a 0-d bool tensor turns out to be true, when `flush` is called."""
        if message not in self._said:
            before = self._flags.get(message, is_true)
            self._flags[message] = before | is_true.to(before.device)

    def flush(self) -> None:
        """Give the warnings whose flags are true. The host waits, once."""
        flags = [flag.to(next(iter(self._flags.values())).device) for flag in self._flags.values()]
        are_true = torch.stack(flags).tolist() if flags else []
        for message, is_true in zip(list(self._flags), are_true):
            if is_true:
                self.warn(message)
        self._flags.clear()


class EqualityCheck:
    """Finds tensors in which replicas differ, and says since when."""

    def __init__(self) -> None:
        self.last_equal: int | None = None  # the number of the step

    def find(self, sets: Mapping[str, Sequence[Tensor]], step: int) -> tuple[str, int, str] | None:
        """The first name of a set whose tensors differ, a replica, and when. The host waits."""
        named = {name: tensors for name, tensors in sets.items() if _is_comparable(tensors)}
        are_different = differences(list(named.values())).tolist() if named else []
        for name, row in zip(named, are_different):
            if True in row:
                i = row.index(True)
                since = "" if self.last_equal is None else f"equal at step {self.last_equal}, "
                return name, i, f"{since}different at step {step}"
        self.last_equal = step
        return None


def _is_comparable(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.layout == torch.strided and not tensor.is_quantized for tensor in tensors)
