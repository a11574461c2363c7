"""`split_batch` of the book, for lists, tuples and dicts of tensors, and its inverse.

Samples lie along dimension 0 of tensors and arrays, and in lists of that length without tensors,
for example of names. Tensors of length 1 or 0-d, numbers and strings belong to every shard.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

ARRAYS = (Tensor, np.ndarray)


def split_batch(batch: Any, k: int) -> list[Any]:
    """k shards, cut as by `tensor_split`. The last ones may be empty."""
    return cut(batch, shard_sizes(num_samples(batch), [1] * k))


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
    arrays = [leaf for leaf in leaves(batch) if isinstance(leaf, ARRAYS) and leaf.ndim]
    lengths = {len(array) for array in arrays}
    lengths = lengths - {1} or lengths
    if len(arrays) > 3 and lengths == {3} and all(array.ndim == 3 for array in arrays):
        lengths.add(len(arrays))  # a list of images: three channels are not three samples
    if len(lengths) != 1 or 0 in lengths or any(map(_is_opaque, leaves(batch))):
        kinds = sorted({type(leaf).__name__ for leaf in leaves(batch)})
        raise ValueError(
            f"A batch of {', '.join(kinds)} with lengths {sorted(lengths)} cannot be split. "
            "Collate it to tensors with one row per sample, in lists, tuples or dicts."
        )
    return lengths.pop()


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive pieces of a batch, without copying tensors."""
    ends = list(accumulate(sizes))

    def piece(part: Any, rows: slice) -> Any:
        has_rows = part.ndim if isinstance(part, ARRAYS) else type(part) in (list, tuple)
        if not has_rows or len(part) != ends[-1]:
            return part
        if not isinstance(part, Tensor) or part.requires_grad:
            return part[rows]
        # by `.data` a step may edit its shard in place after another's has saved the batch
        shard: Any = part[rows].data.as_subclass(type(part))  # `[]` drops torchvision's subclasses
        vars(shard).update(vars(part))
        return shard

    rows = [slice(end - size, end) for size, end in zip(sizes, ends)]
    return [_map(batch, partial(piece, rows=each)) for each in rows]


def leaves(batch: Any) -> list[Any]:
    """Everything in lists, tuples and dicts. A list without tensors is one leaf."""
    found: list[Any] = []
    _map(batch, found.append)
    return found


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What one device would return for the whole batch: rows are joined, numbers averaged."""
    first = outputs[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([output.to(first.device) for output in outputs])
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, (Tensor, float, int)) and not isinstance(first, bool):
        return weighted_mean(outputs, sizes)
    if isinstance(first, Mapping):
        return {key: join_outputs([output[key] for output in outputs], sizes) for key in first}
    if isinstance(first, list) and all(map(_is_per_sample, outputs, sizes)):
        return [item for output in outputs for item in output]  # texts, or boxes
    if isinstance(first, (list, tuple)):
        return _like(first, [join_outputs(items, sizes) for items in zip(*outputs, strict=True)])
    if any(output != first for output in outputs[1:]):
        raise ValueError(
            f"Shards return different {type(first).__name__} values, which cannot be joined: "
            "return numbers, or tensors with one row per sample."
        )
    return first


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of numbers. What has weight 0 may be NaN: it does not count."""
    device = values[0].device if isinstance(values[0], Tensor) else None
    terms = [value * (n / sum(weights)) for value, n in zip(values, weights) if n]
    return sum(term if device is None else term.to(device) for term in terms)


def _map(part: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        changed: Any = copy.copy(part)
        for key, value in part.items():
            changed[key] = _map(value, function)
        return changed
    is_list = isinstance(part, (list, tuple)) and not isinstance(part, PackedSequence)
    if is_list and any(isinstance(leaf, ARRAYS) for item in part for leaf in leaves(item)):
        return _like(part, [_map(item, function) for item in part])
    return function(part)


def _like(part: Any, items: list[Any]) -> Any:
    return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)


def _is_opaque(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_nested or leaf.layout != torch.strided
    return hasattr(leaf, "to") or isinstance(leaf, PackedSequence)


def _is_per_sample(part: list[Any], size: int) -> bool:
    """Not so `[logits, features]` of two samples."""
    return len(part) == size and not any(
        np.ndim(x) and len(x) == size for x in part if isinstance(x, ARRAYS)
    )
