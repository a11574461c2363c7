"""Buffers: every replica starts a step with the same ones.

The running statistics of normalization layers are averaged over the replicas, in their order. For
any other buffer the first replica's value is kept.
"""

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # bytes of the largest dtype


def read_buffers(module: nn.Module) -> Tensor:
    """All buffers in one row of bytes, a copy."""
    parts = [b.detach().contiguous().view(-1).view(torch.uint8) for _, b in _buffers(module)]
    row = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return torch.cat([row, row.new_zeros(-len(row) % ALIGNMENT)])


def write_buffers(module: nn.Module, rows: Tensor) -> None:
    """Set the buffers to what the rows (k, bytes) of k replicas become."""
    end = 0
    for name, buffer in _buffers(module):
        start, end = end, end + buffer.numel() * buffer.element_size()
        values = rows[:, start:end].view(buffer.dtype)  # (k, numel)
        is_statistic = name.endswith(("running_mean", "running_var"))
        value = values.mean(0) if is_statistic and len(rows) > 1 else values[0]
        # by `.data`: a backward pass may still need the buffer, whose value is the same to it
        buffer.data.copy_(value.view(buffer.shape))


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    # the largest dtype first, so that all views are aligned
    return sorted(module.named_buffers(), key=lambda item: -item[1].element_size())
