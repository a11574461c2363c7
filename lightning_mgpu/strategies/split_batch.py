"""`split_batch` of the book, for any nesting of tensors, and its inverse, `gather`, for what the replicas return.

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
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_mgpu.strategies.one_process import wait_for

Array = (Tensor, np.ndarray)
NUM_TIMED = 5  # steps that `split='auto'` looks at


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch along dimension 0 into shards of the given sizes (d2l.ai, 'Training on Multiple GPUs').

    Tensors are cut without copying them.
    """
    return [
        _cut(batch, sum(sizes), slice(end - size, end))
        for size, end in zip(sizes, accumulate(sizes))
    ]


def _cut(part: Any, total: int, rows: slice) -> Any:
    if isinstance(part, Array):
        if not part.ndim or len(part) != total:
            return part
        shard = part[rows]
        if type(shard) is Tensor and type(part) not in (
            Tensor,
            nn.Parameter,
        ):  # torchvision's tv_tensors
            shard = shard.as_subclass(type(part))  # type: ignore[type-var]
            vars(shard).update(vars(part))
        # a view; by `.data` it counts edits in place for itself, as the backward pass checks
        return shard.data if type(shard) is Tensor and not shard.requires_grad else shard
    if (items := items_of(part)) is None:
        return part
    if _is_list(part) and len(part) == total and not _has_arrays(part):
        return part[rows]  # names, say
    return like(part, [_cut(item, total, rows) for item in items])


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


def share_out(
    batch: Any, shares: Sequence[float], device: torch.device, loaded: set[int]
) -> list[int]:
    """Samples of each replica. What cannot be split goes whole to the first, which never goes without.

    `loaded` are the loaders' batch sizes: a list as long holds samples.
    """
    num_samples = find_batch_size(batch, loaded)
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
    # a copy to the CPU is read at once; one to Apple's GPU races with the memory it is made of, as in Lightning
    is_async = device.type not in ("cpu", "mps")
    return apply_to_collection(
        shard, Tensor, lambda t: t.to(device, non_blocking=is_async) if t.device == home else t
    )


def find_batch_size(batch: Any, loaded: set[int]) -> int | None:
    """The number of samples in a batch; `None` if it cannot be split."""
    if any(_is_opaque(leaf) for leaf in leaves(batch)):
        return None
    lengths = {len(leaf) for leaf in leaves(batch) if isinstance(leaf, Array) and leaf.ndim}
    sizes = lengths - {1} or lengths
    if len(sizes) != 1 or 0 in sizes:
        return None
    size = sizes.pop()
    if (
        _is_list(batch) and 3 < len(batch) != size and _is_loaded(batch, loaded)
    ):  # up to 3 are inputs, targets, weights
        return None
    return (
        None if any(_is_ambiguous(item, size, loaded) for item in items_of(batch) or []) else size
    )


def _is_opaque(leaf: Any) -> bool:
    """Whether something moves to a device as a whole, or holds tensors: nobody here knows how to cut it."""
    if isinstance(leaf, Tensor):
        return leaf.is_nested or leaf.layout != torch.strided
    if isinstance(leaf, (np.ndarray, type)):
        return False
    return hasattr(leaf, "to") or any(
        isinstance(each, Array) for each in getattr(leaf, "__dict__", {}).values()
    )


def _is_loaded(part: Any, loaded: set[int]) -> bool:
    """Whether a list is as long as a loader's batch. From then on so are shorter ones, which a last batch may have."""
    if is_loaded := len(part) in loaded:
        loaded.update(range(max(loaded)))
    return is_loaded


def _is_ambiguous(part: Any, size: int, loaded: set[int]) -> bool:
    """Whether a list in a batch may hold what belongs to one sample, tensors too, item by item."""
    if _is_list(part) and _has_arrays(part):
        is_of_images = (
            len(part) > 1 and size == 3 and all(getattr(item, "ndim", 0) == 3 for item in part)
        )
        if len(part) == size or is_of_images or _is_loaded(part, loaded):
            return True
    return any(_is_ambiguous(item, size, loaded) for item in items_of(part) or [])


# Nestings


def items_of(part: Any) -> list[Any] | None:
    """What lies directly in a list, tuple, dict or dataclass; `None` for everything else."""
    if isinstance(part, PackedSequence) or hasattr(
        type(part), "batch_size"
    ):  # the latter: a TensorDict
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
        return (
            type(part)(part.default_factory, named)
            if isinstance(part, defaultdict)
            else type(part)(named)
        )  # type: ignore[call-arg]
    changed: Any = copy.copy(part)
    for field, item in zip(fields(part), items):
        object.__setattr__(changed, field.name, item)  # frozen dataclasses, too
    return changed


def leaves(part: Any) -> Iterator[Any]:
    """Everything in a nesting that is no list, tuple, dict or dataclass."""
    if (items := items_of(part)) is None:
        yield part
    for item in items or ():
        yield from leaves(item)


def _is_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not hasattr(part, "_fields")  # not a named tuple


def _has_arrays(part: Any) -> bool:
    return any(isinstance(leaf, Array) for leaf in leaves(part))


# What replicas return


def gather(
    outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, are_rows: bool = False
) -> Any:
    """Put together what replicas made of shards, as if one device had had the whole batch.

    Tensors and lists as long as their shard, or a multiple of it (tokens), are joined in order; tensors with samples
    along another dimension, too. Other floating values are means over the shard: they are averaged, weighted by the
    sizes. Integers are counts: they add up. Booleans are true if any is. Whatever fits nothing of this comes back as
    the list of what the replicas returned.

    Args:
        outputs: One a replica; `None` is left out.
        sizes: Samples of the shards.
        device: Where tensors go. What all replicas have on the CPU stays there.
        are_rows: Join all tensors that have a dimension, whatever their length.

    Raises:
        ValueError: With `are_rows`, if tensors do not fit together.
    """
    present = [(output, size) for output, size in zip(outputs, sizes) if output is not None]
    outputs, sizes = [output for output, _ in present], [size for _, size in present]
    if len(outputs) < 2:
        return bring_home(outputs[0], device) if outputs else None
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        tensors = [
            output if all(each.is_cpu for each in outputs) else output.to(device)
            for output in outputs
        ]
        return _gather_tensors(tensors, sizes, are_rows)
    if isinstance(first, np.ndarray):
        if first.dtype.kind not in "biufc":  # but of texts
            return np.concatenate(outputs)
        whole = _gather_tensors([torch.as_tensor(output) for output in outputs], sizes, are_rows)
        return apply_to_collection(whole, Tensor, Tensor.numpy)
    if isinstance(first, (bool, np.bool_)):
        return any(outputs)
    if isinstance(first, (int, float, np.number)):
        is_mean = any(isinstance(output, (float, np.inexact)) for output in outputs)
        return weighted_mean(outputs, sizes) if is_mean else sum(outputs)
    if isinstance(first, str) and set(outputs) == {first}:
        return first
    if _is_list(first) and _are_samples(outputs, sizes):
        return type(first)(item for output in outputs for item in bring_home(output, device))
    if isinstance(first, Mapping) and any(output.keys() != first.keys() for output in outputs):
        names = dict.fromkeys(name for output in outputs for name in output)
        return {
            name: gather([output.get(name) for output in outputs], sizes, device, are_rows)
            for name in names
        }
    items = [items_of(output) or [] for output in outputs]
    if items_of(first) is not None and len({len(each) for each in items}) == 1:
        return like(first, [gather(parts, sizes, device, are_rows) for parts in zip(*items)])
    return [bring_home(output, device) for output in outputs]


def _gather_tensors(tensors: list[Tensor], sizes: Sequence[int], are_rows: bool) -> Any:
    first = tensors[0]
    if any(tensor.ndim for tensor in tensors):
        tensors = [
            tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors
        ]  # squeezed from a shard of one
        lengths = [len(tensor) for tensor in tensors]
        if not are_rows and any(length % size for length, size in zip(lengths, sizes)):
            for dim in range(1, first.ndim):
                if all(
                    tensor.shape[dim : dim + 1] == (size,) for tensor, size in zip(tensors, sizes)
                ):
                    return torch.cat(tensors, dim)
        if (
            len({(tensor.ndim, tensor.shape[1:]) for tensor in tensors}) > 1
        ):  # padded to different lengths, say
            if are_rows:
                raise ValueError("tensors of different shapes")
            return [row for tensor in tensors for row in tensor]
        multiples = {len(tensor) / size for tensor, size in zip(tensors, sizes)}
        is_of_samples = len(multiples) == 1 and multiples.pop().is_integer()
        if are_rows or is_of_samples or len({len(tensor) for tensor in tensors}) > 1:
            return torch.cat(tensors)
    if first.is_floating_point() or first.is_complex():
        return weighted_mean(tensors, sizes)
    return torch.stack(tensors).any(0) if first.dtype == torch.bool else torch.stack(tensors).sum(0)


def _are_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists hold one item a sample, or as many as were found in each shard, and not a few results for all."""
    if any(len(output) != size for output, size in zip(outputs, sizes)):
        are_texts = all(isinstance(item, str) for output in outputs for item in output)
        lengths = {len(output) for output in outputs}
        return len(lengths) > 1 or (are_texts and any(output != outputs[0] for output in outputs))
    items = [(item, size) for output, size in zip(outputs, sizes) for item in output]
    if all(isinstance(item, Array) and item.ndim and len(item) == size for item, size in items):
        return False  # [logits, features], as many as there are samples by chance
    return isinstance(outputs[0], list) or not any(
        isinstance(item, (Tensor, int, float)) for item, _ in items
    )


def bring_home(output: Any, device: torch.device) -> Any:
    """Move tensors to the device. What the user has put on the CPU stays there."""
    if all(
        leaf.is_cpu or leaf.device == device for leaf in leaves(output) if isinstance(leaf, Tensor)
    ):
        return output  # the very object, which callbacks may share
    return apply_to_collection(
        output, Tensor, lambda tensor: tensor if tensor.is_cpu else tensor.to(device)
    )


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights. Equal numbers are their mean, without rounding."""
    if len(values) == 1 or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
        return values[0]
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights))


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
        wait_for(device)
        self._seconds[i] += time.perf_counter() - start

    def end_step(self, shares: Sequence[float]) -> list[float]:
        """A step is over: the shares of the next one."""
        self._steps += 1
        if self._steps == 1:  # it warms up
            self._seconds.clear()
        if (
            self.is_done or self._steps <= NUM_TIMED or len(self._seconds) < len(shares)
        ):  # too few samples for all
            return list(shares)
        self.is_done = True
        speeds = [share / self._seconds[i] for i, share in enumerate(shares)]
        split = [speed / sum(speeds) for speed in speeds]
        rank_zero_info(f"split='auto': shares of the batch {[round(share, 3) for share in split]}")
        return split
