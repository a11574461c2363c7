"""`split_batch` of the book for any nesting of tensors, and its inverse for what the replicas return."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def shard_sizes(batch_size: int, shares: Sequence[float]) -> list[int]:
    """How many of `batch_size` samples each device gets, in proportion to its share; even shares as `tensor_split`.

    Largest remainders: every size is the exact proportion rounded down or up, and they add up. The first device, whose
    replica is the user's own module, gets a sample of every batch.
    """
    exact = [batch_size * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: batch_size - sum(sizes)]:
        sizes[i] += 1
    if batch_size and not sizes[0]:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes


def find_batch_size(batch: Any) -> int | None:
    """The length all samples of a batch share along dimension 0; `None` if nothing in it can be split."""
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(part, list) for part in batch):
        lengths = {len(part) for part in batch}
        if len(lengths) == 1 and not _tensor_lengths(batch[0], same=True):
            return lengths.pop()  # lists of images of different sizes, of boxes, ... as detection models take them
    return next(_tensors(batch), torch.empty(0)).size(0) if any(True for _ in _tensors(batch)) else None


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch along dimension 0 into shards of the given sizes (d2l.ai, 'Training on Multiple GPUs').

    Tensors and lists as long as the batch are cut (tensors without copying), in lists, tuples, dicts and dataclasses;
    every other leaf is given to all shards.
    """
    total, start, shards = sum(sizes), 0, []
    for size in sizes:
        shards.append(_cut(batch, total, start, start + size))
        start += size
    return shards


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Put together what replicas made of shards of the given sizes, as if one device had had the whole batch.

    Tensors and lists as long as their shard are joined in order. Other floating values are taken as means over the
    shard and averaged with the sizes as weights; integers are counts and add up, unless all are equal and Python's.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        tensors = [output.to(device) for output in outputs]
        if first.ndim and all(tensor.size(0) == size for tensor, size in zip(tensors, sizes)):
            return torch.cat(tensors)
        if first.dtype == torch.bool or any(tensor.shape != first.shape for tensor in tensors):
            return tensors[0] if all(torch.equal(tensors[0], tensor) for tensor in tensors) else torch.cat(tensors)
        if first.is_floating_point() or first.is_complex():
            return weighted_mean(tensors, sizes)
        return torch.stack(tensors).sum(0)
    if isinstance(first, bool) or first is None or isinstance(first, str):
        return first
    if isinstance(first, float):
        return weighted_mean(outputs, sizes)
    if isinstance(first, int):
        return first if all(output == first for output in outputs) and first != sizes[0] else sum(outputs)
    if isinstance(first, Mapping):
        joined = copy.copy(first)
        for key in first:
            joined[key] = gather([output[key] for output in outputs], sizes, device)  # type: ignore[index]
        return joined
    if isinstance(first, list) and all(len(output) == size for output, size in zip(outputs, sizes)):
        if not _tensor_lengths(first, same=False) == {sizes[0]}:
            return [item for output in outputs for item in output]
    if isinstance(first, (list, tuple)):
        return _like(first, [gather(items, sizes, device) for items in zip(*outputs)])
    return first


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights; for one value, the value itself."""
    if len(values) == 1:
        return values[0]
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights))


def _cut(part: Any, total: int, start: int, stop: int) -> Any:
    if isinstance(part, Tensor):
        return part[start:stop] if part.ndim and part.size(0) == total else part
    if isinstance(part, Mapping):
        shard = copy.copy(part)
        for key in part:
            shard[key] = _cut(part[key], total, start, stop)  # type: ignore[index]
        return shard
    if isinstance(part, (list, tuple)):
        if len(part) == total and total not in _tensor_lengths(part, same=False):
            return part[start:stop]
        return _like(part, [_cut(item, total, start, stop) for item in part])
    if is_dataclass(part) and not isinstance(part, type):
        shard = copy.copy(part)
        for field in fields(part):
            object.__setattr__(shard, field.name, _cut(getattr(part, field.name), total, start, stop))
        return shard
    return part


def _like(sequence: Any, items: list[Any]) -> Any:
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)  # named tuples


def _tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of a nesting that have a dimension 0."""
    if isinstance(part, Tensor):
        if part.ndim:
            yield part
    elif isinstance(part, Mapping):
        for item in part.values():
            yield from _tensors(item)
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))


def _tensor_lengths(items: Sequence[Any], same: bool) -> set[int]:
    """Lengths of the tensors directly in a sequence; with `same`, only if there is one such length for all items."""
    lengths = {item.size(0) for item in items if isinstance(item, Tensor) and item.ndim}
    return lengths if not same or len(lengths) == 1 else set()
