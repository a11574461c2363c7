"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter: a dense copy, with the parameter's own strides
(`ring` and `sharded` cut it in the order of memory, and `fused=True` optimizers read a gradient in
the order of its parameter). A block is all rows of a replica. Every parameter has an owner, the
process that calls the user's function on its k rows.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.allreduce import Allreduce
from lightning_mgpu.strategies.meeting import Meeting, SharedMeeting

ALIGNMENT = 64  # bytes


class Exchange:
    """Blocks in memory that all processes see, or of the only process. Nothing is sent.

    Args:
        parameters: All that may have a gradient.
        allreduce: The user's function. If it has an attribute `many`, that gets all rows at once.
        meeting: Outside of `sum` a process touches only the blocks of its own replicas.
        blocks: Bytes (k, n), or (r, n) for the r replicas here of a `MessageExchange`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        allreduce: Allreduce,
        meeting: Meeting,
        blocks: Tensor,
        num_local: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.parameters, self.allreduce, self.meeting = parameters, allreduce, meeting
        self.blocks, self.num_local, self.rank, self.world_size = (
            blocks,
            num_local,
            rank,
            world_size,
        )
        self.has_gradient = np.zeros((num_local, len(parameters)), np.uint8)
        # owners in order, with about as many bytes each
        ends = np.cumsum([0, *map(num_bytes, parameters)])
        middles = (ends[1:] + ends[:-1]) / 2
        self.owners = (middles * world_size / max(ends[-1], 1)).astype(int)
        bounds = np.searchsorted(self.owners, np.arange(world_size + 1))
        self.sizes = np.diff(ends[bounds]).tolist()  # of a block, per owner
        self.mine = slice(bounds[rank], bounds[rank + 1])
        self._make_rows()

    def _make_rows(self) -> None:
        rows, first = [rows_in(b, self.parameters) for b in self.blocks], self.rank * self.num_local
        self.local_rows, self.sums = rows[first : first + self.num_local], rows[first]
        self.owned_rows = list(zip(*(each[self.mine] for each in rows)))

    def write(self, replica: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients of a replica of this process into its rows. A missing one is zeros."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        self.has_gradient[replica] = [gradient is not None for gradient in gradients]

    def sum(self) -> list[Tensor | None]:
        """Each parameter's sum, until the next `write`; None if no replica has a gradient."""
        flags = self.meeting.gather(self.has_gradient.reshape(-1))  # all have written their rows
        is_present = np.array(flags.reshape(-1, len(self.parameters)).max(axis=0))
        self._bring_to_owners()
        rows = [list(r) for r, present in zip(self.owned_rows, is_present[self.mine]) if present]
        if many := getattr(self.allreduce, "many", None):
            many(rows)
        else:
            for row in rows:
                self.allreduce(row)
        self._hand_back()
        return [total if present else None for total, present in zip(self.sums, is_present)]

    def _bring_to_owners(self) -> None:
        """The owners see the rows already."""

    def _hand_back(self) -> None:
        self.meeting.gather(np.empty(0, np.uint8))  # all owners have finished


class MessageExchange(Exchange):
    """Rows travel to their owners, and the sums back: on GPUs, and between machines."""

    def _make_rows(self) -> None:
        self.local_rows = [rows_in(block, self.parameters) for block in self.blocks]
        size, k = self.sizes[self.rank], self.num_local * self.world_size
        self.incoming, self.returned = self.blocks.new_empty(k, size), self.blocks[0].clone()
        rows = [rows_in(block, self.parameters[self.mine]) for block in self.incoming]
        self.owned_rows, self.sums = list(zip(*rows)), rows_in(self.returned, self.parameters)

    def _bring_to_owners(self) -> None:
        r, each = self.num_local, [self.incoming.numel() // self.world_size] * self.world_size
        parts = [part.reshape(-1) for part in self.blocks.split(self.sizes, dim=1)]
        sent = [r * size for size in self.sizes]
        dist.all_to_all_single(self.incoming.view(-1), torch.cat(parts), each, sent)

    def _hand_back(self) -> None:
        """Each process gets the row of its first replica."""
        first = self.incoming.view(self.world_size, self.num_local, -1)[:, 0]
        each = [first.shape[1]] * self.world_size
        dist.all_to_all_single(self.returned, first.reshape(-1), self.sizes, each)


def make_exchange(
    parameters: Sequence[Tensor],
    allreduce: Allreduce,
    meeting: Meeting,
    share: Callable[[int], Tensor | None],
    num_local: int,
    rank: int,
    world_size: int,
) -> Exchange:
    """With blocks in shared memory, which `share` makes, where the processes meet there, too."""
    size, k = sum(map(num_bytes, parameters)), num_local * world_size
    where = num_local, rank, world_size
    if isinstance(meeting, SharedMeeting) and (memory := share(k * size)) is not None:
        return Exchange(parameters, allreduce, meeting, memory.view(k, size), *where)
    blocks = torch.empty(num_local, size, dtype=torch.uint8, device=parameters[0].device)
    kind = Exchange if world_size == 1 else MessageExchange
    return kind(parameters, allreduce, meeting, blocks, *where)


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
