"""`split_batch` of the book, for any nesting of tensors. Its inverse is `gather` in combining.py.

Samples lie along dimension 0 of all tensors and arrays, and in lists of that length, for example
of names. Tensors of length 1, 0-d tensors, numbers and strings belong to all samples. A batch is
not split if its parts have different lengths (a graph's nodes and edges, lists of images), or if an
object in it moves to a device as a whole.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Array = (Tensor, np.ndarray)


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch along dimension 0 into shards of the given sizes, without copying tensors.

    See d2l.ai, 'Training on Multiple GPUs'.
    """
    slices = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes))]
    return [_cut(batch, sum(sizes), rows) for rows in slices]


def cut_graph(batch: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Replace tensors that have a graph by leaves. Returns the batch, and pairs (tensor, leaf).

    A hook such as `on_after_batch_transfer` may have computed with the module's parameters. The
    backward pass of that graph runs once for the whole batch, after those of the replicas.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def cut(tensor: Tensor) -> Tensor:
        if tensor.is_leaf or not torch.is_grad_enabled():
            return tensor
        pairs.append((tensor, tensor.detach().requires_grad_()))
        return pairs[-1][1]

    has_graph = any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in leaves(batch))
    return (apply_to_collection(batch, Tensor, cut) if has_graph else batch), pairs


def _cut(part: Any, total: int, rows: slice) -> Any:
    if isinstance(part, Array):
        if not part.ndim or len(part) != total:
            return part
        shard = part[rows]
        # torchvision's tv_tensors
        if type(shard) is Tensor and type(part) not in (Tensor, nn.Parameter):
            shard = shard.as_subclass(type(part))  # type: ignore[type-var]
            vars(shard).update(vars(part))
        # a view: by `.data` torch counts its edits in place apart from those of other shards
        return shard.data if type(shard) is Tensor and not shard.requires_grad else shard
    if (items := items_of(part)) is None:
        return part
    if is_list(part) and len(part) == total and not _has_arrays(part):
        return part[rows]  # for example names
    return like(part, [_cut(item, total, rows) for item in items])


def shard_sizes(num_samples: int, shares: Sequence[float]) -> list[int]:
    """How many samples each replica gets, in proportion to its share.

    Each size is rounded down or up, up for the largest remainders. Even shares are split as by
    `tensor_split`.
    """
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: num_samples - sum(sizes)]:
        sizes[i] += 1
    return sizes


def share_out(
    batch: Any, shares: Sequence[float], device: torch.device, loader_batch_sizes: set[int]
) -> list[int]:
    """Number of samples per replica. The first one always gets some, or the batch as a whole.

    `loader_batch_sizes` are the loaders' batch sizes: a list of such a length holds samples.
    """
    num_samples = find_batch_size(batch, loader_batch_sizes)
    if num_samples is None:
        rank_zero_warn(
            "A batch whose parts differ in length along dimension 0, or have no known length, is "
            f"not split: only {device} computes it."
        )
        return [1] + [0] * (len(shares) - 1)
    sizes = shard_sizes(num_samples, shares)
    if sizes[0] == 0:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes


def send(shard: Any, home: torch.device, device: torch.device) -> Any:
    """Move a shard to a replica's device. Tensors on other devices than `home` stay there."""
    if home == device:
        return shard
    # a copy to the CPU is read at once; one to Apple's GPU races with its source, as in Lightning
    is_async = device.type not in ("cpu", "mps")
    return apply_to_collection(
        shard, Tensor, lambda t: t.to(device, non_blocking=is_async) if t.device == home else t
    )


def bring_home(output: Any, device: torch.device) -> Any:
    """Move tensors to the device, except tensors on the CPU."""
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    if all(tensor.is_cpu or tensor.device == device for tensor in tensors):
        return output  # the very object, which callbacks may share
    return apply_to_collection(output, Tensor, lambda t: t if t.is_cpu else t.to(device))


def find_batch_size(batch: Any, loader_batch_sizes: set[int]) -> int | None:
    """The number of samples in a batch; `None` if it cannot be split."""
    if any(_is_opaque(leaf) for leaf in leaves(batch)):
        return None
    lengths = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Array) and leaf.ndim}
    sizes = lengths - {1} or lengths
    if len(sizes) != 1 or 0 in sizes:
        return None
    size = sizes.pop()
    # up to 3 are inputs, targets, weights
    if is_list(batch) and 3 < len(batch) != size and _is_loaded(batch, loader_batch_sizes):
        return None
    items = items_of(batch) or []
    return None if any(_is_ambiguous(item, size, loader_batch_sizes) for item in items) else size


def _is_opaque(leaf: Any) -> bool:
    """Whether something moves to a device as a whole, or holds tensors: it cannot be split."""
    if isinstance(leaf, Tensor):
        return leaf.is_nested or leaf.layout != torch.strided
    if isinstance(leaf, (np.ndarray, type)):
        return False
    held = getattr(leaf, "__dict__", {}).values()
    return hasattr(leaf, "to") or any(isinstance(each, Array) for each in held)


def _is_loaded(part: Any, loader_batch_sizes: set[int]) -> bool:
    """Whether a list is as long as a loader's batch.

    After the first one, shorter lists count too, because a last batch may be shorter.
    """
    if is_loaded := len(part) in loader_batch_sizes:
        loader_batch_sizes.update(range(max(loader_batch_sizes)))
    return is_loaded


def _is_ambiguous(part: Any, size: int, loader_batch_sizes: set[int]) -> bool:
    """Whether a list in a batch may hold what belongs to one sample, tensors too, item by item."""
    if is_list(part) and _has_arrays(part):
        is_of_images = len(part) > 1 and all(getattr(item, "ndim", 0) == size == 3 for item in part)
        if len(part) == size or is_of_images or _is_loaded(part, loader_batch_sizes):
            return True
    return any(_is_ambiguous(item, size, loader_batch_sizes) for item in items_of(part) or [])


# Nestings


def items_of(part: Any) -> list[Any] | None:
    """The items of a list, tuple, dict or dataclass; `None` for everything else."""
    if isinstance(part, PackedSequence) or hasattr(type(part), "batch_size"):  # a TensorDict
        return None
    if isinstance(part, Mapping):
        return list(part.values())
    if isinstance(part, (list, tuple)):
        return list(part)
    if is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name) for field in fields(part)]
    return None


def like(part: Any, items: list[Any]) -> Any:
    """The same list, tuple, dict or dataclass with other items in it."""
    if isinstance(part, (list, tuple)):
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
    if isinstance(part, Mapping):  # by its constructor, as Lightning moves a batch to a device
        named = dict(zip(part, items))
        has_default = isinstance(part, defaultdict)
        return type(part)(part.default_factory, named) if has_default else type(part)(named)  # type: ignore
    changed: Any = copy.copy(part)
    for field, item in zip(fields(part), items):
        object.__setattr__(changed, field.name, item)  # frozen dataclasses, too
    return changed


def leaves(part: Any) -> Iterator[Any]:
    """Everything in a nesting but the lists, tuples, dicts and dataclasses themselves."""
    if (items := items_of(part)) is None:
        yield part
    for item in items or ():
        yield from leaves(item)


def is_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields")  # not a named tuple


def _has_arrays(part: Any) -> bool:
    return any(isinstance(leaf, Array) for leaf in leaves(part))


def hold_samples(parts: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists or tuples, one per shard, hold an item per sample."""
    if any(len(part) != size for part, size in zip(parts, sizes)):
        return False
    items = [(item, size) for part, size in zip(parts, sizes) for item in part]
    if all(isinstance(item, Array) and item.ndim and len(item) == size for item, size in items):
        return False  # [logits, features], as many as there are samples by chance
    is_tuple = not isinstance(parts[0], list)
    return not is_tuple or not any(isinstance(item, (Tensor, int, float)) for item, _ in items)
