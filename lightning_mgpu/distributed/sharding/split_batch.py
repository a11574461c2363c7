"""`split_batch` of the book, for lists, tuples and dicts of tensors.

Samples are stacked along dimension 0 of tensors and arrays, or listed, for example as names.
Every shard contains all tensors and lists of length 1, 0-d tensors, numbers and strings.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_mgpu.distributed.sharding.checksum import is_dense

ARRAYS = (Tensor, np.ndarray)
PLAIN = (np.ndarray, np.generic, str, bytes, int, float, complex, list, tuple, type(None))


def shard_sizes(num_samples: int, shares: Sequence[float]) -> list[int]:
    """Samples per shard: each exact share rounded down, or up for the largest remainders.

    Raises:
        ValueError: If a shard would be empty.
    """
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: num_samples - sum(sizes)]:
        sizes[i] += 1
    if 0 in sizes:
        raise ValueError(
            f"A batch of {num_samples} samples cannot be split among {len(sizes)} replicas: use "
            "drop_last=True, a larger batch size, or fewer devices."
        )
    return sizes


def num_samples(batch: Any) -> int:
    """The number of samples. Raises a ValueError for a batch that cannot be split."""
    arrays = [leaf for leaf in leaves(batch) if isinstance(leaf, ARRAYS) and leaf.ndim]
    lengths = {len(array) for array in arrays}
    lengths = lengths - {1} or lengths
    small = [x for x in leaves(batch) if isinstance(x, ARRAYS) and (not x.ndim or len(x) == 1)]
    if 1 < max(lengths, default=0) <= len(small):
        lengths.add(1)  # not collated: a list of pairs (X, y)
    if len(arrays) > 3 and lengths == {3} and all(array.ndim == 3 for array in arrays):
        lengths.add(len(arrays))  # a list of images: three channels are not three samples
    if len(lengths) != 1 or 0 in lengths or any(map(_is_opaque, leaves(batch))):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves(batch)}))
        raise ValueError(
            f"A batch of {kinds} with lengths {sorted(lengths)} cannot be split. Collate it to "
            "tensors with samples in dimension 0, in lists, tuples or dicts; or, if a hook has "
            'split it, return {"loss": loss, "weight": n}.'
        )
    return lengths.pop()


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into consecutive pieces, without copying tensors."""
    ends = list(accumulate(sizes))
    num = ends[-1]

    def piece(rows: slice, part: Any) -> Any:
        is_list = type(part) in (list, tuple)
        lists = [item for item in part if isinstance(item, (list, tuple))] if is_list else []
        # inner lists may be samples, or fields that torch has collated: ambiguous
        if is_list and (len(part) not in (0, 1, num) or {*map(len, lists)} == {num}):
            raise ValueError(f"A list of {len(part)} in a batch of {num} samples cannot be split.")
        has_rows = part.ndim if isinstance(part, ARRAYS) else is_list
        if not has_rows or len(part) != num:
            return part
        if not isinstance(part, Tensor) or part.requires_grad:
            return part[rows]
        # `.data`: a step may edit its shard in place after autograd has saved another one
        shard: Any = part[rows].data.as_subclass(type(part))  # `[]` drops torchvision's subclasses
        vars(shard).update(vars(part))
        return shard

    rows = [slice(end - size, end) for size, end in zip(sizes, ends)]
    return [_map(batch, partial(piece, shard)) for shard in rows]


def leaves(batch: Any) -> list[Any]:
    """Everything in lists, tuples and dicts. A list or tuple without tensors is one leaf."""
    found: list[Any] = []
    _map(batch, found.append)
    return found


def _map(part: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        changed: Any = copy.copy(part)
        for key, value in part.items():
            changed[key] = _map(value, function)
        return changed
    if isinstance(part, PackedSequence) or not isinstance(part, (list, tuple)):
        return function(part)
    is_named = hasattr(part, "_fields")
    if not is_named and not any(isinstance(leaf, ARRAYS) for item in part for leaf in leaves(item)):
        return function(part)
    items = [_map(item, function) for item in part]
    return type(part)(*items) if is_named else type(part)(items)


def _is_opaque(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not is_dense(leaf)
    return isinstance(leaf, PackedSequence) or not isinstance(leaf, PLAIN)
