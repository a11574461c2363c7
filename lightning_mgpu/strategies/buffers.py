"""Synchronizes buffers, so that every replica starts an optimizer step with the same ones.

The running statistics of normalization layers are averaged over the replicas, in rank order. All
other buffers are set to the value of rank 0, as in DDP.
"""

import torch
from torch import Tensor, nn

from lightning_mgpu.distributed.sharding.checksum import to_bytes

AVERAGED = ("running_mean", "running_var")
STATISTICS = (*AVERAGED, "num_batches_tracked")


def read_buffers(module: nn.Module, num_bytes: int) -> Tensor:
    """Copy all buffers into one row of bytes, (num_bytes,)."""
    parts = [*map(to_bytes, module.buffers())]
    row = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    if len(row) != num_bytes:
        raise RuntimeError("A step created a buffer or changed its shape: create it before fit.")
    return row


@torch.no_grad()
def write_buffers(module: nn.Module, rows: Tensor) -> None:
    """Set the buffers from the rows of all replicas, (k, num_bytes)."""
    end = 0
    for name, buffer in module.named_buffers():
        start, end = end, end + buffer.nbytes
        part = torch.cat([*rows[:, start:end]])  # a new tensor is aligned for every dtype
        values = part.view(buffer.dtype).view(len(rows), buffer.numel())
        is_mean = name.endswith(AVERAGED) and len(rows) > 1
        value = (values.mean(0) if is_mean else values[0]).view(buffer.shape)
        if name.endswith(STATISTICS):
            buffer.data.copy_(value)  # not needed by the backward pass
        elif not torch.equal(value, buffer):
            buffer.copy_(value)  # autograd raises if it needs the old value
