"""Recursive halving and doubling: the bytes of a ring, in 2 log2 k steps."""

import torch
from torch import Tensor

from lightning_mgpu.allreduce.flat import flattened


@torch.no_grad()
def halving_doubling_allreduce(tensors: list[Tensor]) -> None:
    """Sum halves of halves with partners at distance k/2 to 1, then copy them back, in place.

    A reduce-scatter by recursive halving, and an all-gather by recursive doubling. Every device
    sends and receives 2(k-1)/k n bytes, as in a ring, in 2 log2(k) supersteps instead of 2(k-1).

    Raises:
        ValueError: If k, the number of tensors, is not a power of two.

    Source: Thakur, Rabenseifner & Gropp, 'Optimization of Collective Communication Operations in
    MPICH' (2005).
    """
    k = len(tensors)
    if k & (k - 1):
        raise ValueError(f"{k} devices: halving_doubling needs 1, 2, 4, 8, ...: use ring")
    with flattened(tensors) as flat:
        ends = [flat[0].numel() * i // k for i in range(k + 1)]

        def block(i: int, distance: int) -> slice:
            """The slice of the group of `distance` devices that contains i."""
            first = i // distance * distance
            return slice(ends[first], ends[first + distance])

        distances = [2**power for power in range(k.bit_length() - 1)]
        for distance in reversed(distances):
            for i in range(k):
                own, partner = flat[i][block(i, distance)], flat[i ^ distance]
                own.add_(partner[block(i, distance)].to(own.device))
        for distance in distances:
            for i in range(k):
                theirs, partner = block(i ^ distance, distance), flat[i ^ distance]
                flat[i][theirs].copy_(partner[theirs])


halving_doubling_allreduce.powers_of_two = True  # type: ignore[attr-defined]
