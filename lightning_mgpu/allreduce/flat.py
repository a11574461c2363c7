"""Tensors of any shape and layout as flat ones, for the algorithms that cut them into slices."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def flattened(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield each of `tensors` as 1-d, in one element order; writes to it end up in the tensor.

    The order is that of the first tensor's memory. Tensors that are dense and laid out alike
    (contiguous, transposed, channels_last, ...) thus become views and nothing is copied; the others
    are copied, and copied back at the end.
    """
    # outermost dimension in memory first
    order = sorted(range(tensors[0].ndim), key=tensors[0].stride, reverse=True)
    permuted = [t.permute(order) for t in tensors]
    flat = [p.reshape(-1) for p in permuted]
    yield flat
    for p, f in zip(permuted, flat, strict=True):
        if not p.is_contiguous():
            p.copy_(f.view_as(p))
