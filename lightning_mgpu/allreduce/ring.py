"""Ring allreduce: devices send only to their right neighbor; all links carry the same bytes."""

import torch
from torch import Tensor

from lightning_mgpu.allreduce.flat import flattened


@torch.no_grad()
def ring_allreduce(tensors: list[Tensor]) -> None:
    """Pass k chunks around the ring 0 -> 1 -> ... -> k-1 -> 0, to sum and then to share them.

    In each of 2(k-1) steps, every device sends one chunk of n/k bytes and receives another. So
    there are 2k(k-1) messages, and every device sends and receives 2(k-1)/k n bytes: nearly
    independent of k, and the minimum for any allreduce.

    Source: d2l.ai, 'Parameter Servers', 'Ring Synchronization'; Patarasuk & Yuan, 'Bandwidth
    Optimal All-reduce Algorithms for Clusters of Workstations' (2009).
    """
    k = len(tensors)
    with flattened(tensors) as flat:
        chunks = [f.tensor_split(k) for f in flat]  # chunks[device][c], sizes differ by at most 1
        # reduce-scatter: chunk c starts on device c, and every device adds its term
        for step in range(k - 1):
            for i in range(k):
                right, c = (i + 1) % k, (i - step) % k
                chunks[right][c].add_(chunks[i][c].to(tensors[right].device))
        # all-gather: chunk c, complete on device c - 1, is passed around once more
        for step in range(k - 1):
            for i in range(k):
                right, c = (i + 1) % k, (i + 1 - step) % k
                chunks[right][c].copy_(chunks[i][c])
