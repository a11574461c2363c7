"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter: a dense copy with the parameter's own strides
(`ring` and `sharded` cut it in the order of memory, and `fused=True` optimizers read a gradient in
the order of its parameter). A block is all rows of a replica. Every parameter has an owner, the
process that calls the user's function on its k rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.strategies.meeting import SharedMeeting

ALIGNMENT = 64  # bytes


def make_exchange(strategy: Any, parameters: Sequence[Tensor]) -> "Exchange":
    """With all blocks in shared memory, if the processes meet there and it has room."""
    size, r, shared = sum(map(num_bytes, parameters)), strategy.num_local, None
    if isinstance(strategy.meeting, SharedMeeting):
        shared = strategy.share(strategy.num_replicas * size)
    if shared is not None:
        return Exchange(strategy, parameters, shared.view(-1, size))
    blocks = torch.empty(r, size, dtype=torch.uint8, device=strategy.root_device)
    return (Exchange if strategy.is_alone else MessageExchange)(strategy, parameters, blocks)


class Exchange:
    """Blocks in memory that all processes see, or of the only process. Nothing is sent.

    Args:
        strategy: Outside of `sum`, its process touches only the blocks of its own replicas.
        parameters: All that may have a gradient.
        blocks: Bytes (k, n). A `MessageExchange` has those of the r replicas here, (r, n).
    """

    def __init__(self, strategy: Any, parameters: Sequence[Tensor], blocks: Tensor) -> None:
        self.strategy, self.parameters, self.blocks = strategy, parameters, blocks
        self.rank, self.r = strategy.global_rank, strategy.num_local
        self.has_gradient = np.zeros((self.r, len(parameters)), np.uint8)
        # owners in the order of the parameters, with about as many bytes each
        num_owners = strategy.world_size
        ends = np.cumsum([0, *map(num_bytes, parameters)])
        owners = (ends[1:] + ends[:-1]) * num_owners // (2 * max(ends[-1], 1))
        bounds = np.searchsorted(owners, np.arange(num_owners + 1))
        self.sizes = np.diff(ends[bounds]).tolist()  # of a block, by owner
        self.mine = slice(bounds[self.rank], bounds[self.rank + 1])
        self._make_rows()

    def _make_rows(self) -> None:
        rows, first = [rows_in(b, self.parameters) for b in self.blocks], self.rank * self.r
        self.local_rows, self.sums = rows[first : first + self.r], rows[first]
        self.owned_rows = list(zip(*(each[self.mine] for each in rows)))

    def write(self, replica: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients of a replica of this process into its rows. A missing one is zeros."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        self.has_gradient[replica] = [gradient is not None for gradient in gradients]

    def sum(self) -> list[Tensor | None]:
        """Each parameter's sum, until the next `write`; None if no replica has a gradient."""
        meeting, allreduce = self.strategy.meeting, self.strategy.allreduce
        flags = meeting.gather(self.has_gradient.ravel())  # all have written their rows
        is_present = flags.reshape(-1, len(self.parameters)).max(axis=0).tolist()
        self._bring_to_owners()
        rows = [list(row) for row, has in zip(self.owned_rows, is_present[self.mine]) if has]
        if many := getattr(allreduce, "many", None):
            many(rows)
        else:
            for row in rows:
                allreduce(row)
        self._hand_back()
        return [total if has else None for total, has in zip(self.sums, is_present)]

    def _bring_to_owners(self) -> None:
        """The owners see the rows already."""

    def _hand_back(self) -> None:
        self.strategy.meeting.gather(np.empty(0, np.uint8))  # all owners have finished


class MessageExchange(Exchange):
    """Rows travel to their owners, and the sums back: on GPUs, and between machines."""

    def _make_rows(self) -> None:
        self.local_rows = [rows_in(block, self.parameters) for block in self.blocks]
        self.incoming = self.blocks.new_empty(len(self.sizes), self.r, self.sizes[self.rank])
        self.returned = torch.empty_like(self.blocks[0])
        rows = [rows_in(b, self.parameters[self.mine]) for b in self.incoming.flatten(0, 1)]
        self.owned_rows, self.sums = list(zip(*rows)), rows_in(self.returned, self.parameters)

    def _bring_to_owners(self) -> None:
        parts = [part.reshape(-1) for part in self.blocks.split(self.sizes, dim=1)]
        sizes = [len(part) for part in parts]
        dist.all_to_all_single(self.incoming.view(-1), torch.cat(parts), None, sizes)

    def _hand_back(self) -> None:
        """Each process gets the row of its first replica."""
        first = self.incoming[:, 0].reshape(-1)
        dist.all_to_all_single(self.returned, first, self.sizes)


def num_bytes(parameter: Tensor) -> int:
    """Of a row."""
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT


def rows_in(block: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a block (bytes): a dense tensor like each parameter."""
    rows, start = [], 0
    for p in parameters:
        values = block[start : start + p.numel() * p.element_size()].view(p.dtype)
        rows.append(values.as_strided(p.shape, torch.empty_like(p, device="meta").stride()))
        start += num_bytes(p)
    return rows
