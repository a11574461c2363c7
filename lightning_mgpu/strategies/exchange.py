"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter, a dense copy with the strides of the parameter.
`ring` and `sharded` cut a row in the order of memory, and `fused=True` optimizers read a gradient
in the order of its parameter. Every parameter has an owner: the process that calls the user's
function on its k rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.allreduce import Allreduce
from lightning_mgpu.strategies.meeting import Meeting

ALIGNMENT = 64  # bytes


class Exchange:
    """Rows in memory that all processes see, or of the only process. Nothing is sent.

    Args:
        parameters: All that may have a gradient.
        allreduce: The user's function. If it has an attribute `many`, that gets all rows at once.
        meeting: Outside of `sum` a process touches only the rows of its own replicas.
        num_local: Replicas of this process. The other processes have as many.
        memory: `num_local * world_size * num_bytes(parameters)` bytes.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        allreduce: Allreduce,
        meeting: Meeting,
        num_local: int,
        rank: int,
        world_size: int,
        memory: Tensor | None = None,
    ) -> None:
        self.parameters, self.allreduce, self.meeting = parameters, allreduce, meeting
        self.num_local, self.rank, self.world_size = num_local, rank, world_size
        self.num_replicas = num_local * world_size
        self.owners = choose_owners(parameters, world_size)
        self.mine = [p for p, owner in enumerate(self.owners) if owner == rank]
        self.has_gradient = np.zeros((num_local, len(parameters)), np.uint8)
        self._make_rows(memory)

    def _make_rows(self, memory: Tensor | None) -> None:
        assert memory is not None
        each = num_bytes(self.parameters)
        replicas = [rows_in(memory[i * each :], self.parameters) for i in range(self.num_replicas)]
        first = self.rank * self.num_local
        self.local_rows = replicas[first : first + self.num_local]
        self.owned_rows = [[rows[p] for rows in replicas] for p in self.mine]
        self.sums = replicas[first]

    def write(self, replica: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients of a replica of this process into its rows. A missing one is zeros."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        self.has_gradient[replica] = [gradient is not None for gradient in gradients]

    def sum(self) -> list[Tensor | None]:
        """Each parameter's sum over all replicas, until the next `write`.

        It is None if no replica has a gradient.
        """
        flags = self.meeting.gather(self.has_gradient.reshape(-1))  # all have written their rows
        is_present = flags.reshape(self.num_replicas, -1).any(axis=0)
        self._bring_to_owners()
        rows = [row for p, row in zip(self.mine, self.owned_rows) if is_present[p]]
        if many := getattr(self.allreduce, "many", None):
            many([list(row) for row in rows])
        else:
            for row in rows:
                self.allreduce(list(row))
        self._hand_back()
        return [total if present else None for total, present in zip(self.sums, is_present)]

    def _bring_to_owners(self) -> None:
        pass

    def _hand_back(self) -> None:
        self.meeting.gather(np.empty(0, np.uint8))  # all owners have finished


class MessageExchange(Exchange):
    """Rows travel to their owners, and the sums back: on GPUs, and between machines."""

    def _make_rows(self, memory: Tensor | None) -> None:
        owned = [
            [p for p, owner in enumerate(self.owners) if owner == process]
            for process in range(self.world_size)
        ]
        parts = [[self.parameters[p] for p in ps] for ps in owned]
        self.sizes = [num_bytes(part) for part in parts]  # one replica's, for each owner
        self.my_size, r = self.sizes[self.rank], self.num_local
        device = self.parameters[0].device if self.parameters else "cpu"
        total = sum(self.sizes)
        self.outgoing, self.incoming, self.returned = (
            torch.zeros(size, dtype=torch.uint8, device=device)
            for size in (r * total, r * self.world_size * self.my_size, total)
        )
        self.local_rows = [[torch.empty(0)] * len(self.parameters) for _ in range(r)]
        self.sums = [torch.empty(0)] * len(self.parameters)
        by_owner = self.outgoing.split([r * size for size in self.sizes])
        for ps, part, size, to, back in zip(
            owned, parts, self.sizes, by_owner, self.returned.split(self.sizes)
        ):
            for p, row in zip(ps, rows_in(back, part)):
                self.sums[p] = row
            for rows, memory in zip(self.local_rows, to.view(r, size)):
                for p, row in zip(ps, rows_in(memory, part)):
                    rows[p] = row
        replicas = self.incoming.view(self.num_replicas, self.my_size)
        self.owned_rows = list(zip(*(rows_in(memory, parts[self.rank]) for memory in replicas)))

    def _bring_to_owners(self) -> None:
        to = [self.num_local * size for size in self.sizes]
        each = [self.num_local * self.my_size] * self.world_size
        dist.all_to_all_single(self.incoming, self.outgoing, each, to)

    def _hand_back(self) -> None:
        # each process gets the row of its first replica
        first = self.incoming.view(self.world_size, self.num_local, self.my_size)[:, 0]
        each = [self.my_size] * self.world_size
        dist.all_to_all_single(self.returned, first.reshape(-1), self.sizes, each)


def padded_size(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def num_bytes(parameters: Sequence[Tensor]) -> int:
    """What one replica's rows take."""
    return sum(map(padded_size, parameters))


def rows_in(memory: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of memory (bytes), one after the other: a dense tensor like each parameter."""
    rows, end = [], 0
    for parameter in parameters:
        start, end = end, end + padded_size(parameter)
        size = parameter.numel() * parameter.element_size()
        values = memory[start : start + size].view(parameter.dtype)
        # its strides, if the parameter is dense
        strides = torch.empty_like(parameter, device="meta").stride()
        rows.append(values.as_strided(parameter.shape, strides))
    return rows


def choose_owners(parameters: Sequence[Tensor], num_processes: int) -> list[int]:
    """The process of each parameter: the largest go first, to who has the fewest bytes."""
    owners, loads = [0] * len(parameters), [0] * num_processes
    for p in sorted(range(len(parameters)), key=lambda p: -padded_size(parameters[p])):
        owners[p] = loads.index(min(loads))
        loads[owners[p]] += padded_size(parameters[p])
    return owners
