"""The inverse of `split_batch`: what the replicas return, put together on the first device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.strategies.split_batch import Array, items_of, like


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, are_rows: bool = False) -> Any:
    """Put together what replicas made of shards, as if one device had had the whole batch.

    Tensors and lists as long as their shard, or a multiple of it (tokens), are joined in order. Other floating values
    are means over the shard: they are averaged, weighted by the sizes. Integers are counts: they add up. Booleans are
    true if any is. Whatever fits nothing of this comes back as the list of what the replicas returned.

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
        tensors = [output if all(each.is_cpu for each in outputs) else output.to(device) for output in outputs]
        return _gather_tensors(tensors, sizes, are_rows)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate([np.atleast_1d(output) for output in outputs])  # squeezed from a shard of one
    if isinstance(first, (bool, np.bool_)):
        return any(outputs)
    if isinstance(first, (int, float, np.number)):
        is_mean = any(isinstance(output, (float, np.inexact)) for output in outputs)
        return weighted_mean(outputs, sizes) if is_mean else sum(outputs)
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields") and _are_samples(outputs, sizes):
        return type(first)(item for output in outputs for item in bring_home(output, device))
    if isinstance(first, Mapping) and any(output.keys() != first.keys() for output in outputs):
        names = dict.fromkeys(name for output in outputs for name in output)
        return {name: gather([output.get(name) for output in outputs], sizes, device, are_rows) for name in names}
    if (items := items_of(first)) is not None and all(len(items_of(output) or []) == len(items) for output in outputs):
        parts = zip(*(items_of(output) or [] for output in outputs))
        return like(first, [gather(part, sizes, device, are_rows) for part in parts])
    if isinstance(first, str) and set(outputs) == {first}:
        return first
    return [bring_home(output, device) for output in outputs]


def bring_home(output: Any, device: torch.device) -> Any:
    """Move tensors to the device. What the user has put on the CPU stays there."""
    return apply_to_collection(output, Tensor, lambda tensor: tensor if tensor.is_cpu else tensor.to(device))


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights. Equal numbers are their mean, without rounding."""
    if len(values) == 1 or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
        return values[0]
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights))


def _gather_tensors(tensors: list[Tensor], sizes: Sequence[int], are_rows: bool) -> Any:
    first, is_mean = tensors[0], tensors[0].is_floating_point() or tensors[0].is_complex()
    if any(tensor.ndim for tensor in tensors):
        tensors = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]  # squeezed from a shard of one
        if len({(tensor.ndim, tensor.shape[1:]) for tensor in tensors}) > 1:  # padded to different lengths, say
            if are_rows:
                raise ValueError("tensors of different shapes")
            return [row for tensor in tensors for row in tensor]
        multiples = {len(tensor) / size for tensor, size in zip(tensors, sizes)}
        is_of_samples = len(multiples) == 1 and multiples.pop().is_integer()
        if are_rows or is_of_samples or len({len(tensor) for tensor in tensors}) > 1:
            return torch.cat(tensors)
    if is_mean:
        return weighted_mean(tensors, sizes)
    return torch.stack(tensors).any(0) if first.dtype == torch.bool else torch.stack(tensors).sum(0)


def _are_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists hold one item a sample, or as many as were found in each shard, and not a few results for all."""
    if any(len(output) != size for output, size in zip(outputs, sizes)):
        return len({len(output) for output in outputs}) > 1
    items = [(item, size) for output, size in zip(outputs, sizes) for item in output]
    if all(isinstance(item, Array) and item.ndim and len(item) == size for item, size in items):
        return False  # [logits, features], as many as there are samples by chance
    return isinstance(outputs[0], list) or not any(isinstance(item, (Tensor, int, float)) for item, _ in items)
