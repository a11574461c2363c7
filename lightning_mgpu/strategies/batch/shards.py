"""`split_batch` of the book for any nesting of tensors."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_mgpu.strategies.batch.nesting import children, is_dataclass_instance, is_tensordict, leaves, map_items

Array = (Tensor, np.ndarray)


def shard_sizes(batch_size: int, shares: Sequence[float]) -> list[int]:
    """How many of `batch_size` samples each device gets, in proportion to its share; even shares as `tensor_split`.

    Largest remainders: every size is the exact proportion rounded down or up, and they add up.
    """
    exact = [batch_size * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: batch_size - sum(sizes)]:
        sizes[i] += 1
    return sizes


def find_batch_size(batch: Any) -> int | None:
    """The number of samples in a batch; `None` if it cannot be split.

    Samples lie along dimension 0 of all tensors and arrays (those of length 1, or without dimensions, belong to all
    samples) and in lists of that length. Detection models take nothing but lists of samples: those are counted. Parts
    of different lengths (a graph's nodes and edges, loaders combined with different batch sizes) cannot be split, nor
    can objects that move to a device as a whole, nor lists of which one cannot tell what lies along dimension 0.
    """
    if (length := _length_of_lists(batch)) is not None:
        return length
    lengths = {len(array): None for array in _arrays(batch)}  # in order of appearance
    sizes = [length for length in lengths if length > 1] or list(lengths)
    return next((size for size in sizes if size > 0 and _fits(batch, size, nested=False)), None)


def may_be_one_sample(batch: Any) -> bool:
    """Whether what comes from a loader that makes no batches (`batch_size=None`) may be a sample, and no batch.

    It has a 0-d tensor then, or nothing but 1-d ones, which may be a sample's features as well as a batch's labels.
    """
    ndims = {leaf.ndim for leaf in leaves(batch) if isinstance(leaf, Array)}
    return 0 in ndims or ndims == {1}


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch along dimension 0 into shards of the given sizes (d2l.ai, 'Training on Multiple GPUs').

    Tensors and lists as long as the batch are cut (tensors without copying), in lists, tuples, dicts and dataclasses;
    every other leaf is given to all shards.
    """
    total, start, shards = sum(sizes), 0, []
    in_lists = _length_of_lists(batch) is not None
    for size in sizes:
        samples = slice(start, start + size)
        if not in_lists:
            shards.append(_cut(batch, total, samples, nested=False))
        else:
            shards.append(batch[samples] if _is_texts(batch) else map_items(batch, itemgetter(samples)))
        start += size
    return shards


def _cut(part: Any, total: int, samples: slice, nested: bool = True) -> Any:
    if isinstance(part, Array):
        return _rows(part, samples) if part.ndim and len(part) == total else part
    if is_tensordict(part):
        return part[samples]
    if nested and _is_list_of_samples(part, total):
        return part[samples]
    shard = map_items(part, lambda item: _cut(item, total, samples))
    if isinstance(part, UserDict):  # what it has beside its items: the words of every sample (transformers)
        lists = {name: value for name, value in vars(part).items() if isinstance(value, list) and len(value) == total}
        vars(shard).update({name: value[samples] for name, value in lists.items()})
    return shard


def _rows(part: Any, samples: slice) -> Any:
    """Rows of a tensor or array; of a subclass's, `tv_tensors.Image` say, with its class and attributes."""
    rows = part[samples]
    if isinstance(part, Tensor) and type(rows) is not type(part):
        rows = rows.as_subclass(type(part))
    for name, value in getattr(part, "__dict__", {}).items():
        vars(rows).setdefault(name, value)
    return rows


def _fits(part: Any, size: int, nested: bool = True) -> bool:
    """Whether a part of a batch can be cut into `size` samples, or has nothing to cut."""
    if isinstance(part, Tensor):
        is_plain = not part.is_nested and part.layout == torch.strided
        return not part.ndim or (is_plain and len(part) in (1, size))
    if isinstance(part, np.ndarray):
        return not part.ndim or len(part) in (1, size)
    if isinstance(part, PackedSequence) or _is_opaque(part) or _is_ambiguous(part, size, nested):
        return False
    return (nested and _is_list_of_samples(part, size)) or all(_fits(item, size) for item in children(part))


def _is_opaque(part: Any) -> bool:
    """Whether something holds samples that nobody here knows how to cut: a batch of graphs, say."""
    return not isinstance(part, (Mapping, list, tuple)) and not is_dataclass_instance(part) and hasattr(part, "to")


def _is_ambiguous(part: Any, size: int, nested: bool) -> bool:
    """Whether a list of tensors of `size` rows may hold samples: as many as rows, or images, which have 3 channels."""
    arrays = list(_arrays(part)) if _is_sequence(part) and all(isinstance(item, Array) for item in part) else []
    if not arrays or len(arrays) < len(part) or any(len(array) != size for array in arrays):
        return False
    return (nested and len(part) == size) or (len(part) > 1 and size == 3 and all(item.ndim == 3 for item in part))


def _is_list_of_samples(part: Any, size: int) -> bool:
    """Whether a list inside a batch holds something for each of `size` samples: names, say, or boxes of any number."""
    if not _is_sequence(part) or len(part) != size:
        return False
    is_of_tensors = any(isinstance(item, Array) and item.ndim for item in part)
    return _is_of_one_kind(part) and not (is_of_tensors and all(_fits(item, size) for item in part))


def _length_of_lists(batch: Any) -> int | None:
    """The common length of a batch made of lists alone, each with something for every sample; else `None`.

    Lists of tensors of one length are whole batches (two views of the images, say), not lists of samples.
    """
    if _is_texts(batch):
        return len(batch)
    parts = list(children(batch))
    if not parts or not all(_is_sequence(part) and part and _is_of_one_kind(part) for part in parts):
        return None
    lengths = [{len(item) for item in part if isinstance(item, Array) and item.ndim} for part in parts]
    is_of_samples = any(len(varied) != 1 for varied in lengths)
    return len(parts[0]) if is_of_samples and len({len(part) for part in parts}) == 1 else None


def _is_texts(batch: Any) -> bool:
    return _is_sequence(batch) and len(batch) > 0 and all(isinstance(item, str) for item in batch)


def _is_of_one_kind(items: Sequence[Any]) -> bool:
    return len({_kind(item) for item in items if item is not None}) == 1


def _kind(item: Any) -> Any:
    if isinstance(item, Array):
        return type(item), item.ndim
    return (type(item), *sorted(map(str, item))) if isinstance(item, Mapping) else type(item)


def _is_sequence(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields")  # not a named tuple


def _arrays(part: Any) -> Iterator[Any]:
    """The tensors and arrays of a nesting that have a dimension 0, and a length along it."""
    arrays = (leaf for leaf in leaves(part) if isinstance(leaf, Array) and leaf.ndim)
    return (array for array in arrays if not getattr(array, "is_nested", False))
