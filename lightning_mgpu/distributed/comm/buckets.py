"""Buckets: parameters of one dtype whose gradients are sent together."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, of a parameter's part of a row
FIRST_BUCKET = 1 / 16  # fraction of the cap: a small one is sent early, as in DDP
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Gradients = dict[Tensor, Tensor]
"""By parameter. A parameter without a gradient is omitted."""


class Bucket:
    """Parameters whose gradients are sent together, and this process's row: the gradients as bytes.

    Every byte of a row has an owner, the process that calls the allreduce on it. (With one owner,
    every process calls it.) An elementwise allreduce is called on slices of equal size, any other
    on whole parameters, with about the same number of bytes per owner.

    Args:
        parameters: In the order of the row.
        num_owners: Owners follow the order of the bytes.
        is_elementwise: Whether the allreduce may be called on any slice of a row.
        memory: Shared memory of all processes, (P, bytes of a row), and the rank of this process.
            Default: private memory.
    """

    found_nonfinite = False  # set by a message schedule that replaces non-finite values

    def __init__(
        self,
        parameters: Sequence[Tensor],
        num_owners: int,
        is_elementwise: bool,
        memory: tuple[Tensor, int] | None = None,
    ) -> None:
        self.parameters, self.is_elementwise = list(parameters), is_elementwise
        self.dtype = self.parameters[0].dtype
        # gradients have the strides of their parameters, as `fused=True` optimizers expect
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self.begins = np.cumsum([0, *map(padded_size, parameters)])
        num_bytes, owners = self.begins[-1], np.arange(num_owners + 1)
        if is_elementwise:
            cuts = num_bytes // ALIGNMENT * owners // num_owners * ALIGNMENT
        else:
            middles = (self.begins[1:] + self.begins[:-1]) * num_owners // (2 * num_bytes)
            self.bounds = np.searchsorted(middles, owners)  # of parameters, by owner
            cuts = self.begins[self.bounds]
        self.sizes = np.diff(cuts).tolist()  # bytes, by owner
        self.is_shared = memory is not None
        if memory is None:
            device = self.parameters[0].device
            memory = torch.zeros(1, num_bytes, dtype=torch.uint8, device=device), 0
        self.memory, rank = memory
        self.row = self.memory[rank]
        self.gradients = self.views(self.row)
        self.targets: Gradients = {}  # gradients that may be overwritten with sums

    def views(self, part: Tensor, begin: int = 0, end: int | None = None) -> list[Tensor]:
        """The gradients of `parameters[begin:end]`, as dense views of their part of a row."""
        found = []
        starts = (self.begins[begin:end] - self.begins[begin]).tolist()
        for p, strides, start in zip(self.parameters[begin:end], self.strides[begin:end], starts):
            values = part[start : start + p.nbytes].view(p.dtype)
            found.append(values.as_strided(p.shape, strides))
        return found

    def arguments(self, parts: Sequence[Tensor], owner: int) -> list[list[Tensor]]:
        """The k tensors of each allreduce call, from an owner's part of all k rows."""
        if self.is_elementwise:
            return [[part.view(self.dtype) for part in parts]] if len(parts[0]) else []
        begin, end = self.bounds[owner : owner + 2].tolist()
        return [[*tensors] for tensors in zip(*(self.views(part, begin, end) for part in parts))]

    def pack(self, gradients: Gradients) -> None:
        """Copy gradients into the row, and zeros for missing ones."""
        for view, p in zip(self.gradients, self.parameters):
            view.copy_(gradients[p]) if p in gradients else view.zero_()

    def write_results(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Copy the sums into `targets`, or into new memory for parameters without a target."""
        written = []
        for p, strides, X in zip(self.parameters, self.strides, sums):
            target = self.targets.get(p)
            if target is None or target.stride() != strides:
                target = torch.empty_like(p)
            written.append(target.copy_(X))
        return written

    def matches(self, gradients: Gradients) -> bool:
        """Whether the row still contains these gradients. Reads all of them."""
        return all(
            torch.equal(bits(view), bits(gradients[p])) if p in gradients else not view.any()
            for view, p in zip(self.gradients, self.parameters)
        )


def group_parameters(parameters: Sequence[Tensor], cap: float) -> list[list[Tensor]]:
    """Group parameters by dtype, in reverse order, as their gradients become ready.

    The first group has at least a sixteenth of `cap` bytes, and this size doubles per group, up to
    `cap`. With a cap of 0 there is one group per dtype.
    """
    groups, filling = [], defaultdict[torch.dtype, list[Tensor]](list)
    num_bytes, size = defaultdict[torch.dtype, int](int), cap * FIRST_BUCKET
    for p in reversed(parameters):
        filling[p.dtype].append(p)
        num_bytes[p.dtype] += p.nbytes
        if cap and num_bytes[p.dtype] >= size:
            groups.append(filling.pop(p.dtype))
            num_bytes[p.dtype], size = 0, min(cap, 2 * size)
    return [*groups, *filling.values()]


def bits(X: Tensor) -> Tensor:
    """View as integers, which are equal if values are bitwise identical (also NaN)."""
    X = torch.view_as_real(X) if X.is_complex() else X
    return X.view(INTEGERS[X.element_size()])


def padded_size(parameter: Tensor) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
