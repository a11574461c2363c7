"""`join_outputs`, the inverse of `split_batch`: what a step returns of shards becomes one again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.strategies.split_batch import ARRAYS, items_of, like


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What one device returns for the whole batch: rows are joined, numbers are averaged."""
    first = outputs[0]
    if isinstance(first, Tensor):
        rows = [output.to(first.device) for output in outputs]
        return torch.cat(rows) if first.ndim else weighted_mean(rows, sizes)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, list) and all(map(_has_item_per_sample, outputs, sizes)):
        return [item for output in outputs for item in output]
    items = [items_of(output) for output in outputs]
    if items[0] is not None and len({len(each or ()) for each in items}) == 1:
        return like(first, [join_outputs(each, sizes) for each in zip(*items)])
    if all(output == first for output in outputs):
        return first
    if isinstance(first, (int, float)):
        return weighted_mean(outputs, sizes)
    raise ValueError(
        f"A step returns a {type(first).__name__} for every shard, which cannot be joined. Return "
        "tensors with one row per sample, or numbers, in lists, tuples or dicts."
    )


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of numbers. What has weight 0 may be NaN: it does not count."""
    return sum(value * (n / sum(weights)) for value, n in zip(values, weights) if n)


def _has_item_per_sample(part: list[Any], size: int) -> bool:
    """Lists of texts, or of boxes; but not `[logits, features]` for two samples."""
    arrays = [each for each in part if isinstance(each, ARRAYS) and each.ndim]
    return len(part) == size and not any(len(each) == size for each in arrays)
