"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter: a dense copy with the parameter's own strides,
as `fused=True` optimizers read it. Every parameter has an owner, the process that calls the user's
function on its k rows. A block is the rows of one replica for one owner, and the replica's buffers.

CPU processes of one machine have all blocks in shared memory. Others send them to their owners, and
the sums back. Two processes of one replica each own all parameters both: each sends its one block
to the other, which is as many bytes, and no sums travel back.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.allreduce import allreduce_many
from lightning_mgpu.processes.meeting import finish, share_memory

ALIGNMENT = 64  # bytes


class Exchange:
    """The blocks of k replicas: gradients of all parameters that are trained, and buffers.

    Args:
        strategy: A `ManualAllreduceStrategy`.
        layout: By parameter, what all processes must find alike.
        num_buffer_bytes: Of one replica.
    """

    def __init__(self, strategy: Any, layout: dict[Tensor, Any], num_buffer_bytes: int) -> None:
        self.strategy, self.layout, self.num_buffer_bytes = strategy, layout, num_buffer_bytes
        self.parameters = parameters = [*layout]
        r, num_processes, rank = strategy.num_local, strategy.world_size, strategy.global_rank
        is_shared = strategy.is_one_machine and strategy.root_device.type == "cpu"
        self.both_own_all = num_processes == 2 and r == 1 and not is_shared
        num_owners, mine = (1, 0) if self.both_own_all else (num_processes, rank)

        # owners in the order of the parameters, with about as many bytes each
        ends = np.cumsum([0, *map(padded_size, parameters)])
        owners = (ends[1:] + ends[:-1]) * num_owners // (2 * max(ends[-1], 1))
        bounds = np.searchsorted(owners, np.arange(num_owners + 1))
        owned = [parameters[start:end] for start, end in pairwise(bounds)]
        self.mine = slice(bounds[mine], bounds[mine + 1])
        self.sizes = np.diff(ends[bounds]).tolist()  # of a block without buffers, by owner
        self.size = self.sizes[mine]

        # what a process sends, a part for each owner: all in one memory, or each in its own
        num_padded = -(-num_buffer_bytes // ALIGNMENT) * ALIGNMENT
        self.lengths = [r * (size + num_padded) for size in self.sizes]
        num_bytes = sum(self.lengths)
        memory = share_memory(strategy, num_processes * num_bytes) if is_shared else None
        self.has_messages = memory is None and not strategy.is_alone
        if memory is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=strategy.root_device)
        sent = memory.view(-1, num_bytes)
        self.outgoing = sent[rank % len(sent)]
        incoming = sent.split(self.lengths, dim=1)[mine]
        if self.has_messages:
            incoming = memory.new_empty(num_processes, self.lengths[mine])
        self.incoming = incoming
        self.work: Any = None  # a message on its way

        self.local_rows: list[list[Tensor]] = [[] for _ in range(r)]
        self.local_buffers: list[list[Tensor]] = [[] for _ in range(r)]
        for part, own, size in zip(self.outgoing.split(self.lengths), owned, self.sizes):
            for i, block in enumerate(part.view(r, -1)):
                self.local_rows[i] += rows_in(block, own)
                self.local_buffers[i].append(block[size : size + num_buffer_bytes])
        blocks = [block for part in incoming for block in part.view(r, -1)]
        self.owned_rows = [*zip(*(rows_in(block, owned[mine]) for block in blocks))]
        self.all_buffers = [block[self.size : self.size + num_buffer_bytes] for block in blocks]
        # each process reads the sums in the rows of its first replica, or in a message's
        self.sums = self.local_rows[0]
        if self.both_own_all:
            self.sums = [row[rank] for row in self.owned_rows]
        elif self.has_messages:
            self.received = memory.new_empty(sum(self.sizes))
            self.sums = rows_in(self.received, parameters)

    def write(
        self, replica: int, gradients: Sequence[Tensor | None], buffers: Tensor | None = None
    ) -> None:
        """Copy a replica's gradients, of which a missing one is zeros, and its buffers (bytes)."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        if buffers is not None:
            for copy in self.local_buffers[replica]:
                copy.copy_(buffers)

    def start(self) -> None:
        """Send the blocks to their owners, if it is by a message, and do not wait."""
        if self.has_messages and self.work is None and len(self.outgoing):
            if self.both_own_all:
                whole = self.incoming.view(-1)
                self.work = dist.all_gather_into_tensor(whole, self.outgoing, async_op=True)
            else:
                lengths, own = self.lengths, self.incoming.view(-1)
                self.work = dist.all_to_all_single(own, self.outgoing, None, lengths, async_op=True)

    def finish(self) -> None:
        """Wait for messages on their way."""
        if self.work is not None:
            finish(self.strategy, self.work, self.outgoing.is_cpu)
            self.work = None

    def sum(self, is_present: Sequence[bool]) -> tuple[list[Tensor | None], Tensor]:
        """After a meeting, each parameter's sum, and the buffers of all replicas, (k, bytes).

        They are to be copied before the next `write`. A sum is None if it is not present.
        """
        self.start()
        self.finish()
        rows = [list(row) for row, has in zip(self.owned_rows, is_present[self.mine]) if has]
        allreduce_many(self.strategy.allreduce, rows)
        buffers = torch.stack(self.all_buffers)
        if not self.has_messages:
            # after this meeting all sums are there; until the next, a process touches its own only
            self.strategy.gather(np.zeros(1, np.uint8), "sums")
        elif not self.both_own_all:  # each process gets the row of its first replica
            first = self.incoming[:, : self.size].flatten()
            self.work = dist.all_to_all_single(self.received, first, self.sizes, async_op=True)
            self.finish()
        return [total if has else None for total, has in zip(self.sums, is_present)], buffers


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
