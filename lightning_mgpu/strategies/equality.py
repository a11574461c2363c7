"""Whether replicas hold the same bits: a digest of every tensor, made where the tensor is.

Eight bytes of each tensor travel, and the host waits once for all of them, if at all.
"""

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**20  # elements: a digest takes 8 bytes of memory for each of so many


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """64 bits that tell a tensor's values, in order, from others: a 0-d int64 tensor on its device.

    A sum of the elements' bits, weighted by their places. 0.0 and -0.0 are equal, and so are all
    NaNs. The shape and the strides do not matter.
    """
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).split(CHUNK):
        if part.is_floating_point() and part.element_size() > 1:
            part = torch.where(
                part.isnan(), torch.nan, part + 0
            )  # makes 0.0 of -0.0, one NaN of all
        places = torch.arange(1, len(part) + 1, device=part.device)
        total = total * 31 + (part.view(BITS[part.element_size()]) * places).sum()
    return total


def differences(sets: Sequence[Sequence[Tensor]]) -> Tensor:
    """For n sets of k tensors, which differ from the first of their set: bool, of shape (n, k).

    The result is on the first tensors' device. The host has not waited for it.
    """
    digests = [torch.stack([digest(tensor) for tensor in column]) for column in zip(*sets)]
    return torch.stack([digests[0] != each.to(digests[0].device) for each in digests], dim=1)


class Notes:
    """Warnings of what may not be what one device would have: each once, and without a wait."""

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
            flag = differences([tensors]).any()
            self._flags[message] = self._flags.get(message, flag) | flag

    def flush(self) -> None:
        """Say what has turned out. The host waits, once."""
        flags = [flag.to(next(iter(self._flags.values())).device) for flag in self._flags.values()]
        for message, is_true in zip(
            list(self._flags), torch.stack(flags).tolist() if flags else []
        ):
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
        found = differences(list(named.values())).tolist() if named else []
        for name, row in zip(named, found):
            if True in row:
                i = row.index(True)
                since = "" if self.last_equal is None else f"equal at step {self.last_equal}, "
                return name, i, f"{since}different at step {step}"
        self.last_equal = step
        return None


def _is_comparable(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.layout == torch.strided and not tensor.is_quantized for tensor in tensors)
