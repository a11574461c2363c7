"""Flattens tensors of any shape and strides, for algorithms that cut them into slices."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def flattened(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` as 1-d, all in the same element order; writes reach the tensors.

    Elements are in the memory order of the first tensor. So dense tensors with identical strides
    (contiguous, transposed, channels_last, ...) become views and nothing is copied; any others are
    copied, and copied back at the end.
    """
    # outermost dimension in memory first
    order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
    permuted = [t.permute(order) for t in tensors]
    flat = [p.reshape(-1) for p in permuted]
    yield flat
    for p, f in zip(permuted, flat, strict=True):
        if not p.is_contiguous():
            p.copy_(f.view_as(p))
