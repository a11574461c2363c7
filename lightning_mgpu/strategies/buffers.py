"""Every replica starts a step with the same buffers.

The running statistics of normalization layers are averaged over the replicas, in their order. Of
any other buffer the first replica's value is kept.
"""

import torch
from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def read_buffers(module: nn.Module, num_bytes: int | None = None) -> Tensor:
    """A copy of all buffers in one row of bytes, as many as before a step."""
    parts = [b.detach().contiguous().view(-1).view(torch.uint8) for _, b in _buffers(module)]
    row = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    if num_bytes is not None and len(row) != num_bytes:
        raise RuntimeError("A step has made a buffer, or changed its shape: make it before fit.")
    return row


@torch.no_grad()
def write_buffers(module: nn.Module, rows: Tensor) -> None:
    """Set the buffers to what the rows (k, bytes) of k replicas become."""
    end = 0
    for name, buffer in _buffers(module):
        start, end = end, end + buffer.nbytes
        values = rows[:, start:end].flatten().view(buffer.dtype).view(len(rows), -1)
        is_mean = name.endswith(STATISTICS[:2]) and len(rows) > 1
        value = (values.mean(0) if is_mean else values[0]).view(buffer.shape)
        if name.endswith(STATISTICS):
            buffer.data.copy_(value)  # the backward pass does not need them
        elif not torch.equal(value, buffer):
            buffer.copy_(value)  # autograd raises if it needs the buffer as it was


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    # the largest dtype first, so that all views are aligned
    return sorted(module.named_buffers(), key=lambda item: -item[1].element_size())
