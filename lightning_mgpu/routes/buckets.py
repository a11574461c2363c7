"""Buckets: parameters whose gradients travel together."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: where a parameter's part of a row may begin
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Gradients = dict[Tensor, Tensor]
"""By parameter. One without a gradient is left out."""


class Bucket:
    """Parameters, and the rows of this process in one piece of memory.

    A row is one replica's gradients, in bytes. Every parameter has an owner, the process that calls
    the allreduce on its k gradients (with one owner, every process does). The memory is cut by
    owners and then by replicas: a block is the part of a row that has one owner.

    Args:
        parameters: In the order in which they stand in a row.
        num_rows: r, the replicas of this process.
        num_owners: Owners are in the order of the parameters, with about as many bytes each.
        memory: Bytes that all processes have mapped, (P, r * bytes of a row), and this process's
            number. Left out: memory of its own.
    """

    has_spoiled = False  # set by an exchange's route that replaces numbers that are not finite

    def __init__(
        self,
        parameters: Sequence[Tensor],
        num_rows: int,
        num_owners: int = 1,
        memory: tuple[Tensor, int] | None = None,
    ) -> None:
        self.parameters, self.num_rows = list(parameters), num_rows
        # gradients are laid out like their parameters, as `fused=True` optimizers read them
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        ends = np.cumsum([0, *map(padded_size, parameters)])
        middles = (ends[1:] + ends[:-1]) * num_owners // (2 * max(ends[-1], 1))
        self.bounds = np.searchsorted(middles, np.arange(num_owners + 1)).tolist()
        self.sizes = np.diff(ends[self.bounds]).tolist()  # bytes of a block, by owner
        self.lengths = [num_rows * size for size in self.sizes]  # of the blocks of all rows here
        if memory is None:
            device = self.parameters[0].device
            memory = torch.zeros(1, sum(self.lengths), dtype=torch.uint8, device=device), 0
        self.targets: Gradients = {}  # in whose memory sums may be left
        self.memory, rank = memory
        self.own = self.memory[rank]
        self.rows: list[list[Tensor]] = [[] for _ in range(num_rows)]
        for owner, part in enumerate(self.own.split(self.lengths)):
            for row, block in zip(self.rows, part.view(num_rows, -1)):
                row += self.views(block, owner)

    def views(self, block: Tensor, owner: int) -> list[Tensor]:
        """The gradients in a block: dense tensors like the owner's parameters."""
        begin, end = self.bounds[owner : owner + 2]
        found, start = [], 0
        for p, strides in zip(self.parameters[begin:end], self.strides[begin:end]):
            values = block[start : start + p.nbytes].view(p.dtype)
            found.append(values.as_strided(p.shape, strides))
            start += padded_size(p)
        return found

    def gather_rows(self, parts: Iterable[Tensor], owner: int) -> list[list[Tensor]]:
        """For each of the owner's parameters, the k gradients in the parts of all processes."""
        blocks = (block for part in parts for block in part.view(self.num_rows, -1))
        return [[*rows] for rows in zip(*(self.views(block, owner) for block in blocks))]

    def pack(self, replicas: Sequence[Gradients]) -> None:
        """Copy the gradients of the replicas here into their rows. A missing one is zeros."""
        for row, gradients in zip(self.rows, replicas):
            for view, p in zip(row, self.parameters):
                view.copy_(gradients[p]) if p in gradients else view.zero_()

    def keep(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The sums in memory that they may stay in: new one, if a parameter has no target."""
        kept = []
        for p, strides, X in zip(self.parameters, self.strides, sums):
            target = self.targets.get(p)
            if target is None or target.stride() != strides:
                target = torch.empty_like(p)
            kept.append(target.copy_(X))
        return kept

    def holds(self, replicas: Sequence[Gradients]) -> bool:
        """Whether the rows still are these gradients, whose numbers are read."""
        return all(
            torch.equal(bits(view), bits(gradients[p])) if p in gradients else not view.any()
            for row, gradients in zip(self.rows, replicas)
            for view, p in zip(row, self.parameters)
        )


def group_parameters(parameters: Sequence[Tensor], cap: float) -> list[list[Tensor]]:
    """Groups of at least `cap` bytes, in the reverse order, in which gradients become ready.

    A cap of 0 means one group.
    """
    groups, num_bytes = [list[Tensor]()], 0
    for p in reversed(parameters):
        if cap and num_bytes >= cap:
            groups.append([])
            num_bytes = 0
        groups[-1].append(p)
        num_bytes += p.nbytes
    return groups if groups[0] else []


def versions_of(replicas: Sequence[Gradients]) -> list[list[tuple[int, int]]]:
    """They change when a gradient is replaced, or edited in place."""
    return [[(id(g), g._version) for g in gradients.values()] for gradients in replicas]


def bits(X: Tensor) -> Tensor:
    """Integers that are equal if the numbers have the same bits, as those of NaN."""
    X = torch.view_as_real(X) if X.is_complex() else X
    return X.view(INTEGERS[X.element_size()])


def padded_size(parameter: Tensor) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
