"""Every replica starts an update with the same buffers.

The running statistics of normalization layers are averaged over the replicas, in their order. Of
any other buffer the first replica's value is kept.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mgpu.shards.checksum import to_bytes

AVERAGED = ("running_mean", "running_var")
STATISTICS = (*AVERAGED, "num_batches_tracked")


class ReplicaBuffers:
    """The buffers of each replica here. The module holds those of one at a time."""

    def __init__(self, module: nn.Module, num_local: int) -> None:
        self.module, self.num_bytes = module, sum(b.nbytes for b in module.buffers())
        self.rows = [read_buffers(module)] * num_local if num_local > 1 else []
        self.held, self.seen = 0, self._look()

    def hold(self, replica: int) -> None:
        """Let the module hold the buffers of this replica."""
        if replica != self.held:
            write_buffers(self.module, self.rows[replica][None])
            self.held = replica

    def take(self) -> None:
        """Keep the buffers that the module holds, as a step or a backward pass has left them."""
        if self.rows:
            self.rows[self.held] = read_buffers(self.module, self.num_bytes)
            self.seen = self._look()

    def refuse_edits(self, is_thorough: bool) -> None:
        """Raise a MisconfigurationException if a hook has edited one of several replicas' buffers.

        A thorough look waits for the device, but sees `.data`, too.
        """
        if self.rows and (is_thorough or self._look() != self.seen):
            found = read_buffers(self.module, self.num_bytes)
            if not torch.equal(found, self.rows[self.held]):
                raise MisconfigurationException(
                    "A hook has edited buffers within an update, of one of several replicas here: "
                    "edit them in `on_train_batch_end` of its last batch, or leave out `replicas`."
                )

    def to_row(self) -> Tensor:
        """The bytes of all replicas here, (r * n,)."""
        return torch.cat(self.rows or [read_buffers(self.module, self.num_bytes)])

    def _look(self) -> Any:
        return [(b._version, b.data_ptr()) for b in self.module.buffers()] if self.rows else []


def read_buffers(module: nn.Module, num_bytes: int | None = None) -> Tensor:
    """A copy of all buffers in one row of bytes, as many as before a step."""
    parts = [*map(to_bytes, module.buffers())]
    row = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    if num_bytes is not None and len(row) != num_bytes:
        raise RuntimeError("A step has made a buffer, or changed its shape: make it before fit.")
    return row


@torch.no_grad()
def write_buffers(module: nn.Module, rows: Tensor) -> None:
    """Set the buffers to what the rows (k, bytes) of k replicas become."""
    end = 0
    for name, buffer in module.named_buffers():
        start, end = end, end + buffer.nbytes
        part = torch.cat([*rows[:, start:end]])  # a new tensor is aligned for every dtype
        values = part.view(buffer.dtype).view(len(rows), buffer.numel())
        is_mean = name.endswith(AVERAGED) and len(rows) > 1
        value = (values.mean(0) if is_mean else values[0]).view(buffer.shape)
        if name.endswith(STATISTICS):
            buffer.data.copy_(value)  # the backward pass does not need them
        elif not torch.equal(value, buffer):
            buffer.copy_(value)  # autograd raises if it needs the buffer as it was
