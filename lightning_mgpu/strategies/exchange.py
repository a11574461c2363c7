"""k gradients of every parameter come together, and an allreduce leaves their sum in each of them.

A row is one replica's gradient of one parameter: a dense copy with the parameter's own strides,
as `fused=True` optimizers read it. A block is all rows of a replica. Every parameter has an owner,
the process that calls the user's function on its k rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.allreduce import allreduce_many

ALIGNMENT = 64  # bytes


class Exchange:
    """Rows travel to their owners and the sums back, by two all-to-all messages."""

    def __init__(self, strategy: Any, parameters: Sequence[Tensor]) -> None:
        self.strategy, self.parameters = strategy, parameters
        self.has_gradient = np.zeros((strategy.num_local, len(parameters)), np.uint8)
        # owners in the order of the parameters, with about as many bytes each
        num_owners, rank = strategy.world_size, strategy.global_rank
        ends = np.cumsum([0, *map(num_bytes, parameters)])
        owners = (ends[1:] + ends[:-1]) * num_owners // (2 * max(ends[-1], 1))
        bounds = np.searchsorted(owners, np.arange(num_owners + 1))
        self.sizes = np.diff(ends[bounds]).tolist()  # of a block, by owner
        self.mine = slice(bounds[rank], bounds[rank + 1])

        r, size, device = strategy.num_local, sum(self.sizes), strategy.root_device
        self.blocks = torch.empty(r, size, dtype=torch.uint8, device=device)  # of replicas here
        self.incoming = self.blocks[None]
        if not strategy.is_alone:
            self.incoming = self.blocks.new_empty(num_owners, r, self.sizes[rank])
        self.local_rows = [rows_in(block, parameters) for block in self.blocks]
        owned = [rows_in(b, parameters[self.mine]) for b in self.incoming.flatten(0, 1)]
        self.owned_rows = list(zip(*owned))

    def write(self, replica: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients of a replica of this process into its rows. A missing one is zeros."""
        for row, gradient in zip(self.local_rows[replica], gradients):
            row.zero_() if gradient is None else row.copy_(gradient)
        self.has_gradient[replica] = [gradient is not None for gradient in gradients]

    def sum(self) -> list[Tensor | None]:
        """Each parameter's sum, in new memory; None if no replica has a gradient."""
        wait = self.strategy.start_gather(self.has_gradient)
        if not self.strategy.is_alone:
            parts = [part.flatten() for part in self.blocks.split(self.sizes, dim=1)]
            lengths = [len(part) for part in parts]
            dist.all_to_all_single(self.incoming.view(-1), torch.cat(parts), None, lengths)
        is_present = wait().reshape(-1, len(self.parameters)).max(axis=0).tolist()
        rows = [list(row) for row, has in zip(self.owned_rows, is_present[self.mine]) if has]
        allreduce_many(self.strategy.allreduce, rows)
        sums = torch.empty_like(self.blocks[0])
        if self.strategy.is_alone:
            sums.copy_(self.blocks[0])
        else:  # each process gets the row of its first replica
            dist.all_to_all_single(sums, self.incoming[:, 0].flatten(), self.sizes)
        totals = rows_in(sums, self.parameters)
        return [total if has else None for total, has in zip(totals, is_present)]


def num_bytes(parameter: Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT


def rows_in(block: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a block (bytes): a dense tensor like each parameter."""
    rows, start = [], 0
    for p in parameters:
        values = block[start : start + p.numel() * p.element_size()].view(p.dtype)
        rows.append(values.as_strided(p.shape, torch.empty_like(p, device="meta").stride()))
        start += num_bytes(p)
    return rows
