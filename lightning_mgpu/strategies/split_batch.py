"""`split_batch` of the book, for any nesting of tensors: a batch is cut into one shard a replica.

Samples lie along dimension 0 of all tensors and arrays, and in lists of that length (names, say). Tensors of length 1,
0-d tensors, numbers and strings belong to all samples. What nobody knows how to cut is not split: parts of different
lengths (a graph's nodes and edges, lists of images), and objects that move to a device as a whole.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_mgpu.strategies.one_process import device_module

Array = (Tensor, np.ndarray)
NUM_TIMED = 5  # steps that `split='auto'` looks at


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch along dimension 0 into shards of the given sizes (d2l.ai, 'Training on Multiple GPUs').

    Tensors are cut without copying them.
    """
    return [_cut(batch, sum(sizes), slice(end - size, end)) for size, end in zip(sizes, accumulate(sizes))]


def shard_sizes(num_samples: int, shares: Sequence[float]) -> list[int]:
    """How many of the samples each replica gets, in proportion to its share; even shares as `tensor_split`.

    Every size is the exact proportion rounded down or up; the largest remainders are rounded up.
    """
    exact = [num_samples * share / sum(shares) for share in shares]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: num_samples - sum(sizes)]:
        sizes[i] += 1
    return sizes


def share_out(batch: Any, shares: Sequence[float], device: torch.device) -> list[int]:
    """Samples of each replica. What cannot be split goes whole to the first, which never goes without."""
    num_samples = find_batch_size(batch)
    if num_samples is None:
        rank_zero_warn(
            "A batch whose parts differ in length along dimension 0, or that nobody knows how to cut, is not split: "
            f"{device} computes it alone."
        )
        return [1] + [0] * (len(shares) - 1)
    sizes = shard_sizes(num_samples, shares)
    if sizes[0] == 0:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes


def send(shard: Any, home: torch.device, device: torch.device) -> Any:
    """A shard on a replica's device. What the user has put elsewhere stays there."""
    if home == device:
        return shard
    is_async = device.type != "cpu"  # nobody waits for a copy to the CPU, which is read at once
    return apply_to_collection(shard, Tensor, lambda t: t.to(device, non_blocking=is_async) if t.device == home else t)


def find_batch_size(batch: Any) -> int | None:
    """The number of samples in a batch; `None` if it cannot be split."""
    if any(_is_opaque(leaf) for leaf in leaves(batch)):
        return None
    lengths = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Array) and leaf.ndim}
    sizes = lengths - {1} or lengths
    if len(sizes) != 1 or 0 in sizes or any(_is_ambiguous(item, *sizes) for item in items_of(batch) or []):
        return None
    return sizes.pop()


def items_of(part: Any) -> list[Any] | None:
    """What lies directly in a list, tuple, dict or dataclass; `None` for everything else."""
    if isinstance(part, PackedSequence) or hasattr(type(part), "batch_size"):  # the latter: a TensorDict
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
    changed: Any = copy.copy(part)
    if isinstance(part, Mapping):
        for name, item in zip(part, items):
            changed[name] = item
    else:
        for field, item in zip(fields(part), items):
            object.__setattr__(changed, field.name, item)  # frozen dataclasses, too
    return changed


def leaves(part: Any) -> Iterator[Any]:
    """Everything in a nesting that is no list, tuple, dict or dataclass."""
    items = items_of(part)
    if items is None:
        yield part
    else:
        for item in items:
            yield from leaves(item)


def _cut(part: Any, total: int, rows: slice) -> Any:
    if isinstance(part, Array):
        if not part.ndim or len(part) != total:
            return part
        shard = part[rows]  # a view; by `.data` it counts edits in place for itself, as the backward pass checks
        return shard.data if isinstance(shard, Tensor) and not shard.requires_grad else shard
    items = items_of(part)
    if items is None:
        return part
    if _is_list(part) and len(part) == total and not any(isinstance(leaf, Array) for leaf in leaves(part)):
        return part[rows]  # names, say
    return like(part, [_cut(item, total, rows) for item in items])


def _is_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields")  # not a named tuple


def _is_opaque(leaf: Any) -> bool:
    """Whether something moves to a device as a whole: nobody here knows how to cut it."""
    if isinstance(leaf, Tensor):
        return leaf.is_nested or leaf.layout != torch.strided
    return isinstance(leaf, PackedSequence) or (hasattr(leaf, "to") and not isinstance(leaf, (np.ndarray, type)))


def _is_ambiguous(part: Any, size: int) -> bool:
    """Whether a list in a batch may hold what belongs to one sample, tensors too, item by item."""
    if _is_list(part) and any(isinstance(leaf, Array) for leaf in leaves(part)):
        is_of_images = len(part) > 1 and size == 3 and all(getattr(item, "ndim", 0) == 3 for item in part)
        if len(part) == size or is_of_images:
            return True
    return any(_is_ambiguous(item, size) for item in items_of(part) or [])


class AutoSplit:
    """`split='auto'`: times the replicas in the first steps, and turns the times into shares of the batch."""

    def __init__(self, is_asked: bool = True) -> None:
        self.is_done = not is_asked
        self._seconds: dict[int, float] = defaultdict(float)  # by replica
        self._steps = 0

    @contextmanager
    def timed(self, i: int, device: torch.device) -> Iterator[None]:
        """Add the time of the block to replica i's, until its device is through."""
        start = time.perf_counter()
        yield
        if self.is_done:
            return
        if (module := device_module(device)) is not None:
            module.synchronize(device)
        self._seconds[i] += time.perf_counter() - start

    def end_step(self, shares: Sequence[float]) -> list[float]:
        """A step is over: the shares of the next one."""
        self._steps += 1
        if self._steps == 1:  # it warms up
            self._seconds.clear()
        if self.is_done or self._steps <= NUM_TIMED or len(self._seconds) < len(shares):  # too few samples for all
            return list(shares)
        self.is_done = True
        speeds = [share / self._seconds[i] for i, share in enumerate(shares)]
        split = [speed / sum(speeds) for speed in speeds]
        rank_zero_info(f"split='auto': shares of the batch {[round(share, 3) for share in split]}")
        return split
