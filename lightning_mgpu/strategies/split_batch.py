"""`split_batch` of the book, for lists, tuples and dicts of tensors.

Samples lie along dimension 0 of tensors and arrays, and in lists of that length without tensors,
for example of names. Tensors of length 1 or 0-d, numbers and strings belong to every shard.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

ARRAYS = (Tensor, np.ndarray)


def split_batch(batch: Any, k: int, shards: Sequence[int] | None = None) -> list[Any]:
    """All of k shards, or the given ones, cut as by `tensor_split`. The last ones may be empty."""
    whole = cut(batch, shard_sizes(num_samples(batch), [1] * k))
    return whole if shards is None else [whole[i] for i in shards]


def slice_batch(batch: Any, first: int, last: int, k: int) -> Any:
    """The samples of shards `first` to `last - 1` of k, in one piece."""
    sizes = shard_sizes(num_samples(batch), [1] * k)
    return cut(batch, [sum(sizes[:first]), sum(sizes[first:last]), sum(sizes[last:])])[1]


def shard_sizes(num_samples: int, shares: Sequence[float]) -> list[int]:
    """Samples per shard: each exact share rounded down, or up for the largest remainders."""
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: num_samples - sum(sizes)]:
        sizes[i] += 1
    return sizes


def num_samples(batch: Any) -> int:
    """The number of samples; a ValueError for a batch that cannot be split."""
    fix = "Collate it to tensors with one row per sample, in lists, tuples or dicts."
    arrays = [part for part in leaves(batch) if isinstance(part, ARRAYS) and part.ndim]
    for part in leaves(batch):
        is_odd = isinstance(part, Tensor) and (part.is_nested or part.layout != torch.strided)
        if is_odd or (hasattr(part, "to") and not isinstance(part, Tensor)):
            raise ValueError(f"A {type(part).__name__} in a batch cannot be split. {fix}")
    lengths = {len(array) for array in arrays}
    lengths = lengths - {1} or lengths
    if len(arrays) > 3 and lengths == {3} and all(array.ndim == 3 for array in arrays):
        lengths.add(len(arrays))  # a list of images: three channels are not three samples
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"A batch with tensors of lengths {sorted(lengths)} cannot be split. {fix}"
        )
    return lengths.pop()


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into consecutive pieces of the given sizes, without copying tensors."""
    ends = list(accumulate(sizes))
    return [_rows(batch, slice(end - size, end), ends[-1]) for size, end in zip(sizes, ends)]


def leaves(part: Any) -> Iterator[Any]:
    """Everything in lists, tuples and dicts but themselves."""
    if (items := items_of(part)) is None:
        yield part
    for item in items or ():
        yield from leaves(item)


def items_of(part: Any) -> list[Any] | None:
    if isinstance(part, Mapping):
        return list(part.values())
    is_list = isinstance(part, (list, tuple)) and not isinstance(part, PackedSequence)
    return list(part) if is_list else None


def like(part: Any, items: Sequence[Any]) -> Any:
    """The same list, tuple or dict with other items in it."""
    if not isinstance(part, Mapping):
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
    other: Any = copy.copy(part)
    for key, item in zip(part, items):
        other[key] = item
    return other


def _rows(part: Any, rows: slice, total: int) -> Any:
    if isinstance(part, ARRAYS):
        if not part.ndim or len(part) != total:
            return part
        shard: Any = part[rows]
        if isinstance(part, Tensor) and not part.requires_grad:
            # by `.data` a step may edit its shard in place after another's has saved the batch
            shard = shard.data.as_subclass(type(part))  # torchvision's tv_tensors: `[]` drops it
            vars(shard).update(vars(part))
        return shard
    if (items := items_of(part)) is None:
        return part
    is_list = not isinstance(part, Mapping) and not hasattr(part, "_fields")
    if is_list and len(items) == total and not any(isinstance(x, ARRAYS) for x in leaves(part)):
        return part[rows]  # for example names
    return like(part, [_rows(item, rows, total) for item in items])
