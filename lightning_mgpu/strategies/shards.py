"""`split_batch` of the book for any nesting of tensors, and its inverse for what the replicas return."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

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
            shards.append(batch[samples] if _is_texts(batch) else _map(batch, itemgetter(samples)))
        start += size
    return shards


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Put together what replicas made of shards of the given sizes, as if one device had had the whole batch.

    Tensors and lists as long as their shard, or a multiple of it (tokens of all its samples), are joined in order.
    Other floating values are taken as means over the shard and averaged with the sizes as weights; integers are counts
    and add up; booleans are true if any is. What nothing of this fits comes back as the list of what replicas returned.
    """
    present = [(output, size) for output, size in zip(outputs, sizes) if output is not None]
    outputs, sizes = [output for output, _ in present], [size for _, size in present]
    if len(outputs) <= 1:
        return move_data_to_device(outputs[0], device) if outputs else None
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _gather_tensors([output.to(device) for output in outputs], sizes)
    if all(isinstance(output, np.ndarray) and output.ndim for output in outputs):
        return np.concatenate(outputs)
    if _is_tensordict(first):
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for output in outputs for key in output.keys())  # noqa: SIM118 (of a TensorDict: rows)
        return _with_items(first, {key: gather([output.get(key) for output in outputs], sizes, device) for key in keys})
    if isinstance(first, (bool, np.bool_)):
        return any(outputs)
    if isinstance(first, (int, float)):
        return weighted_mean(outputs, sizes) if any(isinstance(output, float) for output in outputs) else sum(outputs)
    if isinstance(first, (list, tuple)):
        if are_samples(outputs, sizes):
            return type(first)(move_data_to_device(item, device) for output in outputs for item in output)
        return like(first, [gather(items, sizes, device) for items in zip(*outputs)])
    if _is_dataclass(first):
        names = [field.name for field in fields(first)]
        values = {name: gather([getattr(output, name) for output in outputs], sizes, device) for name in names}
        return _with_fields(first, values)
    return first if isinstance(first, str) and set(outputs) == {first} else move_data_to_device(list(outputs), device)


def leaves(part: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Everything in a nesting of lists, tuples, dicts and dataclasses that is none of these.

    A container that lies inside itself is entered once; `around` are the ids of those that `part` lies in.
    """
    if not isinstance(part, (Mapping, list, tuple)) and not _is_dataclass(part):
        yield part
    elif id(part) not in around:
        for item in _children(part):
            yield from leaves(item, (*around, id(part)))


def are_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists hold one item a sample, not a few results for the whole shard."""
    if hasattr(outputs[0], "_fields"):
        return False
    if any(len(output) != size for output, size in zip(outputs, sizes)):
        return len({len(output) for output in outputs}) > 1  # as many as were found in each shard
    items = [(item, size) for output, size in zip(outputs, sizes) for item in output]
    if all(isinstance(item, Array) and item.ndim and len(item) == size for item, size in items):
        return False  # [logits, features], as many as there are samples by chance
    return isinstance(outputs[0], list) or not any(isinstance(item, (Tensor, int, float)) for item, _ in items)


def like(sequence: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the same type with other items."""
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights; for one value, or equal numbers, the value itself."""
    if len(values) == 1 or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
        return values[0]
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights))


def _gather_tensors(tensors: list[Tensor], sizes: Sequence[int]) -> Any:
    first = tensors[0]
    if not any(tensor.ndim for tensor in tensors):
        if first.dtype == torch.bool:
            return torch.stack(tensors).any()
        return weighted_mean(tensors, sizes) if _is_inexact(first) else torch.stack(tensors).sum(0)
    tensors = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]  # squeezed from a shard of one
    if len({(tensor.ndim, tensor.shape[1:]) for tensor in tensors}) > 1:
        return [row for tensor in tensors for row in tensor]  # padded to different lengths, say
    multiples = {tensor.size(0) / size for tensor, size in zip(tensors, sizes)}
    if len({tensor.shape for tensor in tensors}) > 1 or (len(multiples) == 1 and multiples.pop().is_integer()):
        return torch.cat(tensors)
    if first.dtype == torch.bool:
        return torch.stack(tensors).any(0)
    return weighted_mean(tensors, sizes) if _is_inexact(first) else torch.stack(tensors).sum(0)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cut(part: Any, total: int, samples: slice, nested: bool = True) -> Any:
    if isinstance(part, Array):
        return _rows(part, samples) if part.ndim and len(part) == total else part
    if _is_tensordict(part):
        return part[samples]
    if nested and _is_list_of_samples(part, total):
        return part[samples]
    shard = _map(part, lambda item: _cut(item, total, samples))
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
    return (nested and _is_list_of_samples(part, size)) or all(_fits(item, size) for item in _children(part))


def _is_opaque(part: Any) -> bool:
    """Whether something holds samples that nobody here knows how to cut: a batch of graphs, say."""
    return not isinstance(part, (Mapping, list, tuple)) and not _is_dataclass(part) and hasattr(part, "to")


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
    parts = list(_children(batch))
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


def _is_tensordict(part: Any) -> bool:
    """A TensorDict or tensorclass with batch dimensions: indexed and concatenated like a tensor."""
    return hasattr(type(part), "batch_size") and isinstance(part.batch_size, torch.Size) and len(part.batch_size) > 0


def _is_dataclass(part: Any) -> bool:
    return is_dataclass(part) and not isinstance(part, type)


def _children(part: Any) -> Iterator[Any]:
    """What is directly inside a list, tuple, dict or dataclass."""
    if isinstance(part, Mapping):
        yield from part.values()
    elif isinstance(part, (list, tuple)):
        yield from part
    elif _is_dataclass(part):
        yield from (getattr(part, field.name) for field in fields(part))


def _map(part: Any, function: Callable[[Any], Any]) -> Any:
    """The same container with the function applied to what is directly inside."""
    if isinstance(part, Mapping):
        return _with_items(part, {key: function(part[key]) for key in part.keys()})  # noqa: SIM118
    if isinstance(part, (list, tuple)):
        return like(part, [function(item) for item in part])
    if _is_dataclass(part):
        return _with_fields(part, {field.name: function(getattr(part, field.name)) for field in fields(part)})
    return part


def _with_items(part: Mapping, items: dict[Any, Any]) -> Any:
    is_copied = isinstance(part, (dict, UserDict)) or hasattr(part, "__copy__")  # else a copy may share what is inside
    if not is_copied or not hasattr(part, "__setitem__"):
        return type(part)(items)  # type: ignore[call-arg]
    changed: Any = copy.copy(part)
    for key, value in items.items():
        changed[key] = value
    return changed


def _with_fields(part: Any, values: dict[str, Any]) -> Any:
    changed = copy.copy(part)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # frozen ones too
    return changed


def _arrays(part: Any) -> Iterator[Any]:
    """The tensors and arrays of a nesting that have a dimension 0, and a length along it."""
    arrays = (leaf for leaf in leaves(part) if isinstance(leaf, Array) and leaf.ndim)
    return (array for array in arrays if not getattr(array, "is_nested", False))
