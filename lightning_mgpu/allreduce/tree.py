"""Binary-tree allreduce: as many messages as the textbook's, but pairs work concurrently."""

import torch
from torch import Tensor


@torch.no_grad()
def tree_allreduce(tensors: list[Tensor]) -> None:
    """Sum pairwise up a tree rooted in device 0, then copy the sum down the same tree, in place.

    For k = 4: 1 -> 0 and 3 -> 2, then 2 -> 0; back 0 -> 2, then 0 -> 1 and 2 -> 3.

    2(k-1) messages of n bytes in 2 floor(log2 k) supersteps. Device 0 is the busiest: it
    receives and sends ceil(log2 k) n bytes.

    Source: the binomial tree of Thakur, Rabenseifner & Gropp, 'Optimization of Collective
    Communication Operations in MPICH' (2005).
    """
    k = len(tensors)
    distance = 1
    while distance < k:
        for i in range(0, k - distance, 2 * distance):
            tensors[i].add_(tensors[i + distance].to(tensors[i].device))
        distance *= 2
    while distance > 1:
        distance //= 2
        for i in range(0, k - distance, 2 * distance):
            tensors[i + distance].copy_(tensors[i])


tree_allreduce.elementwise = True  # type: ignore[attr-defined]
