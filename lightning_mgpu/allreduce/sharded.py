"""Sharded allreduce: every device is the parameter server of one slice."""

import torch
from torch import Tensor

from lightning_mgpu.allreduce.flat import flattened


@torch.no_grad()
def sharded_allreduce(tensors: list[Tensor]) -> None:
    """Cut tensors into k slices, sum slice i on device i, then copy it to the others, in place.

    2k(k-1) messages of n/k bytes in 2 supersteps: every device sends and receives 2(k-1)/k n bytes,
    the minimum for any allreduce, and all devices work at the same time. The first loop is a
    reduce-scatter, the second one an all-gather.

    Source: d2l.ai, 'Parameter Servers', data-parallel training with the parameters on all GPUs, and
    the exercise of 'Training on Multiple GPUs' that asks for it.
    """
    k = len(tensors)
    with flattened(tensors) as flat:
        # slices[device][owner], sizes differ by at most 1
        slices = [f.tensor_split(k) for f in flat]
        # owner i reads from i + shift: no device sends two messages at a time
        for shift in range(1, k):
            for owner in range(k):
                mine, theirs = slices[owner][owner], slices[(owner + shift) % k][owner]
                mine.add_(theirs.to(mine.device))
        for shift in range(1, k):
            for owner in range(k):
                slices[(owner + shift) % k][owner].copy_(slices[owner][owner])
