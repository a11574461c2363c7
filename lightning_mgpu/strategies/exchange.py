"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter: a dense copy with the parameter's own strides,
as `fused=True` optimizers read it. Every parameter has an owner, the process that calls the user's
function on its k rows. A block is the rows of one replica for one owner.

CPU processes of one machine have all rows in shared memory. Others send them to their owners, and
the sums back.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.allreduce import allreduce_many
from lightning_mgpu.strategies.shared_memory import share_memory

ALIGNMENT = 64  # bytes


class Exchange:
    """The rows of k replicas of all parameters that are trained."""

    def __init__(self, strategy: Any, parameters: Sequence[Tensor]) -> None:
        self.strategy, self.parameters = strategy, parameters
        r, num_owners, rank = strategy.num_local, strategy.world_size, strategy.global_rank
        self.has_gradient = np.zeros((r, len(parameters)), np.uint8)
        # owners in the order of the parameters, with about as many bytes each
        ends = np.cumsum([0, *map(padded_size, parameters)])
        owners = (ends[1:] + ends[:-1]) * num_owners // (2 * max(ends[-1], 1))
        bounds = np.searchsorted(owners, np.arange(num_owners + 1))
        owned = [parameters[start:end] for start, end in pairwise(bounds)]
        self.mine = slice(bounds[rank], bounds[rank + 1])
        self.sizes = np.diff(ends[bounds]).tolist()  # of a block, by owner

        # what processes send, a message for each owner: all in one memory, or each in its own
        self.lengths = [r * size for size in self.sizes]
        num_bytes = sum(self.lengths)
        memory = None
        if strategy.shares_memory:
            memory = share_memory(strategy, num_owners * num_bytes)
        self.has_messages = memory is None and not strategy.is_alone
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=strategy.root_device)
        sent = memory.view(-1, num_bytes)
        self.outgoing = sent[rank % len(sent)]
        self.incoming = sent.split(self.lengths, dim=1)[rank]
        if self.has_messages:
            self.incoming = memory.new_empty(num_owners, self.lengths[rank])

        self.local_rows: list[list[Tensor]] = [[] for _ in range(r)]
        for part, own in zip(self.outgoing.split(self.lengths), owned):
            for rows, block in zip(self.local_rows, part.view(r, -1)):
                rows += rows_in(block, own)
        blocks = [block for part in self.incoming for block in part.view(r, -1)]
        self.owned_rows = [*zip(*(rows_in(block, owned[rank]) for block in blocks))]
        # each process reads the sums in the rows of its first replica, or in a message's
        self.sums = self.local_rows[0]
        if self.has_messages:
            self.received = memory.new_empty(sum(self.sizes))
            self.sums = rows_in(self.received, parameters)

    def write(self, replica: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients of a replica of this process into its rows. A missing one is zeros."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        self.has_gradient[replica] = [gradient is not None for gradient in gradients]

    def sum(self) -> list[Tensor | None]:
        """Each parameter's sum, to be copied before the next `write`.

        It is None if no replica has a gradient.
        """
        # in shared memory, this is the meeting after which all rows are there
        gathered = self.strategy.gather(self.has_gradient)
        if self.has_messages:
            dist.all_to_all_single(self.incoming.view(-1), self.outgoing, None, self.lengths)
        is_present = gathered.reshape(-1, len(self.parameters)).max(axis=0).tolist()
        rows = [list(row) for row, has in zip(self.owned_rows, is_present[self.mine]) if has]
        allreduce_many(self.strategy.allreduce, rows)
        if self.has_messages:  # each process gets the row of its first replica
            first = self.incoming[:, : self.sizes[self.strategy.global_rank]].flatten()
            dist.all_to_all_single(self.received, first, self.sizes)
        else:
            # and after this one all sums; until the next, a process touches its own rows only
            self.strategy.gather(np.zeros(1, np.uint8))
        return [total if has else None for total, has in zip(self.sums, is_present)]


def padded_size(parameter: Tensor) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT


def rows_in(block: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a block (bytes): a dense tensor like each parameter."""
    rows, start = [], 0
    for p in parameters:
        values = block[start : start + p.nbytes].view(p.dtype)
        rows.append(values.as_strided(p.shape, torch.empty_like(p, device="meta").stride()))
        start += padded_size(p)
    return rows
