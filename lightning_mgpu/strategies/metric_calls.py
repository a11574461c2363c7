"""A metric gets the shards of all replicas in one update, if they can be joined.

| arguments | the metric gets |
| --- | --- |
| arrays and lists as long as their shard, or all the same multiple of it (tokens) | one update |
| numbers, for an aggregator such as MeanMetric | one update, weighted by the shards' samples |
| anything else: sums of classes, weights of classes, objects | one update per shard |
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from lightning_mgpu.strategies.split_batch import Array, hold_samples, is_list, items_of, like


class Call(NamedTuple):
    """A replica's call of a metric's method, or of `self.log`."""

    metric: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_weights: bool = False  # whether an argument is a weight or a buffer: not of samples


def call_once(
    calls: Sequence[Call], sizes: Sequence[int], devices: Sequence[torch.device], blank: Any
) -> Any:
    """Update a metric with all shards, or call it. `blank` makes a copy of it without samples."""
    (metric, method, *_), device = calls[0], devices[0]
    if method == "reset":
        return metric.reset()
    joined = None
    if not any(call.has_weights for call in calls):
        joined = _aggregated(calls, sizes, devices) or _joined(calls, sizes, device)
    if joined is not None:
        return (metric if method == "forward" else metric.update)(*joined[0], **joined[1])
    of_batch = blank(metric)
    for call in [call for call in calls if not _is_empty(call)] or calls[:1]:
        args = tuple(_bring(each, device) for each in call.args)
        kwargs = {name: _bring(each, device) for name, each in call.kwargs.items()}
        metric.update(*args, **kwargs)
        if method == "forward":
            of_batch.update(*args, **kwargs)
    if method == "update":
        return None
    value = of_batch.compute()  # before its parts: a wrapper computes with them
    for part, its_copy in zip(metric.modules(), of_batch.modules()):
        if isinstance(part, Metric):  # private: what is logged
            part._forward_cache = value if its_copy is of_batch else its_copy.compute()
    return value


def _bring(given: Any, device: torch.device) -> Any:
    """An argument on the device, also if it is an object that holds tensors (a distribution)."""
    given = move_data_to_device(given, device)
    held = dict(getattr(given, "__dict__", {}))
    if isinstance(given, Tensor) or not any(isinstance(each, Tensor) for each in held.values()):
        return given
    moved = copy.copy(given)
    vars(moved).update(move_data_to_device(held, device))
    return moved


def _is_empty(call: Call) -> bool:
    """Whether a shard has given arrays without rows only: one device would not have called."""
    arrays = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Array)]
    return bool(arrays) and all(each.ndim and not len(each) for each in arrays)


def _joined(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> Any:
    """The arguments for the whole batch. None if they cannot be joined."""
    given = [{**dict(enumerate(call.args)), **call.kwargs} for call in calls]
    if any(each.keys() != given[0].keys() for each in given):
        return None
    multiples: set[float] = set()
    try:
        joined = {
            name: _join([each[name] for each in given], sizes, device, multiples)
            for name in given[0]
        }
    except ValueError:
        return None
    if len(multiples) > 1:
        return None
    return [joined.pop(n) for n in range(len(calls[0].args))], joined


def _join(
    parts: Sequence[Any], sizes: Sequence[int], device: torch.device, multiples: set[float]
) -> Any:
    """One argument for the whole batch. `multiples` gets how often it is as long as its shard.

    Raises:
        ValueError: If it has no rows of samples.
    """
    first = parts[0]
    if all(isinstance(part, Array) and part.ndim for part in parts):
        ratios = {len(part) / size for part, size in zip(parts, sizes)}
        if len(ratios) > 1 or not next(iter(ratios)).is_integer():
            raise ValueError("no rows of samples")
        if len({part.shape[1:] for part in parts}) > 1:
            raise ValueError("different shapes")
        multiples |= ratios
        if isinstance(first, np.ndarray):
            return np.concatenate(list(parts))
        return torch.cat([part if part.is_cpu else part.to(device) for part in _alike(parts)])
    if first is None or isinstance(first, (bool, str)):
        if all(part == first for part in parts):
            return first
        raise ValueError("different values")
    if is_list(first) and hold_samples(parts, sizes):
        multiples.add(1.0)
        every = (item for part in parts for item in part)
        return type(first)(move_data_to_device(item, device) for item in every)
    items = [items_of(part) or [] for part in parts]
    keys = {tuple(part) if isinstance(part, dict) else len(items_of(part) or ()) for part in parts}
    if any(items_of(part) is None for part in parts) or len(keys) > 1:
        raise ValueError("not a nesting of rows of samples")
    return like(first, [_join(column, sizes, device, multiples) for column in zip(*items)])


def _alike(parts: Sequence[Any]) -> Iterator[Tensor]:
    """Move tensors to one device: a GPU, if one of them is there."""
    are_on_cpu = all(part.is_cpu for part in parts)
    device = next((part.device for part in parts if not part.is_cpu), None)
    yield from parts if are_on_cpu else (part.to(device) for part in parts)


def _aggregated(
    calls: Sequence[Call], sizes: Sequence[int], devices: Sequence[torch.device]
) -> Any:
    """Arguments of an aggregator: numbers or vectors of the shards, weighted for a mean."""
    metric, device = calls[0].metric, devices[0]
    aggregator = metric.base_metric if isinstance(metric, Running) else metric
    if not isinstance(aggregator, BaseAggregator):
        return None
    given = [dict(zip(("value", "weight"), call.args)) | call.kwargs for call in calls]
    values = [torch.as_tensor(each["value"], device=device) for each in given]
    is_mean, is_vector = isinstance(aggregator, MeanMetric), bool(values[0].ndim)
    has_rows = all(value.ndim and len(value) % size == 0 for value, size in zip(values, sizes))
    if len({value.shape for value in values}) > 1 or has_rows or (is_vector and not is_mean):
        return None
    if not is_mean:
        return [torch.stack(values)], {}
    weights = [each.get("weight", 1.0) for each in given]
    if len({*weights}) == 1 and isinstance(weights[0], float):  # it weighs every batch alike
        # k vectors weigh as much as those of any batch, also if they are results of the shards
        whole = sum(sizes) / (len(devices) if is_vector else 1)
        weights = [weight * size / whole for weight, size in zip(weights, sizes)]
    rows = [torch.as_tensor(each, device=device).expand_as(v) for each, v in zip(weights, values)]
    return [torch.stack(values), torch.stack(rows)], {}
