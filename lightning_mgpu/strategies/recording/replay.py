"""What replicas recorded in a step, done once, on the original: the second half of `recording.py`."""

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from numbers import Number
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_mgpu.strategies.batch.gather import are_samples, gather, place_of, weighted_mean
from lightning_mgpu.strategies.batch.nesting import leaves, like
from lightning_mgpu.strategies.recording.recording import Logged, Record, Recorder, Returned, copy_metric, inner_metric


def replay(recorder: Recorder, records: Sequence[Record], sizes: Sequence[int]) -> None:
    """Do on the original module, whose `recorder` it is, what replicas with shards of the given sizes recorded."""
    module, values = recorder.module, {}
    for call, made in _aligned([list(record.calls.items()) for record in records]).items():
        arguments, call_sizes = [arguments for _, arguments in made], [sizes[i] for i, _ in made]
        values[call[0]] = _call_metric(recorder.metrics[call[0][0]], call[0][1], arguments, call_sizes, module.device)
    logged = [[(entry[0], entry) for entry in record.logged] for record in records]
    for (name, _), entries in _aligned(logged).items():
        first, kwargs = entries[0][1][1], dict(entries[0][1][2])
        shard_sizes = [sizes[i] for i, _ in entries]
        weights: Sequence[float] = shard_sizes
        if kwargs.get("batch_size") is not None:
            given = [entry[2]["batch_size"] for _, entry in entries]
            weights, kwargs["batch_size"] = recorder.batch_sizes.of_batch(name, given, shard_sizes)
        if isinstance(first, Logged):
            value = recorder.metrics[first.name]
        elif isinstance(first, Returned):
            value = values[first.call] if first.key is None else values[first.call][first.key]
        else:
            value = _reduced(
                [entry[1] for _, entry in entries], weights, kwargs.get("reduce_fx", "mean"), module.device
            )
        recorder.log(name, value, **kwargs)


def _call_metric(
    metric: Any, method: str, arguments: list[tuple[tuple, dict[str, Any]]], sizes: Sequence[int], device: torch.device
) -> Any:
    """One call with the shards' arguments put together."""
    device = place_of(arguments, device)
    call = metric if method == "forward" else getattr(metric, method)
    if method in ("compute", "reset"):
        return call()
    scalars = [[_is_scalar(value) for value in (*args, *kwargs.values())] for args, kwargs in arguments]
    if any(map(any, scalars)) and isinstance(base := inner_metric(metric), BaseAggregator):
        return call(*_aggregated(base, arguments, sizes, device))
    if not any(map(any, scalars)):
        with contextlib.suppress(_CannotBeJoined):
            args, kwargs = _joined(arguments, sizes, device)
            return call(*args, **kwargs)
    # Sums and counts for a metric of the user's own, texts, or tensors that do not fit together: one by one
    if method == "forward" and type(metric).forward in (Metric.forward, MetricCollection.forward):
        return _forward_in_parts(metric, move_data_to_device(arguments, device))
    returned = [call(*move_data_to_device(args, device), **move_data_to_device(kw, device)) for args, kw in arguments]
    return gather(returned, sizes, device)


def _forward_in_parts(metric: Any, arguments: list[tuple[tuple, dict[str, Any]]]) -> Any:
    """`forward` of a metric with the arguments of several shards: an update with each, and the value of all of them."""
    batch = copy_metric(metric)
    batch.reset()
    for args, kwargs in arguments:
        batch.update(*args, **kwargs)
        metric.update(*args, **kwargs)
    value = batch.compute()
    for part, its_copy in zip(metric.modules(), batch.modules()):
        if isinstance(part, Metric):
            part._forward_cache = its_copy.compute()  # what is logged of the step
    return value


def _joined(
    arguments: Sequence[tuple[tuple, dict[str, Any]]], sizes: Sequence[int], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = zip(*arguments)
    names = list(kwargs[0])
    if any(len(other) != len(args[0]) for other in args) or any(list(other) != names for other in kwargs):
        raise _CannotBeJoined
    joined = tuple(_join(values, sizes, device) for values in zip(*args))
    return joined, {name: _join([other[name] for other in kwargs], sizes, device) for name in names}


def _join(values: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Samples of all shards, whatever their number: also tokens, or those that a mask left."""
    first = values[0]
    if all(isinstance(value, Tensor) and value.shape[1:] == first.shape[1:] for value in values):
        return torch.cat([value.to(device) for value in values])
    if all(isinstance(value, (list, tuple)) for value in values):
        if _are_parts(values, sizes):
            return like(first, [_join(part, sizes, device) for part in zip(*values)])
        if isinstance(first, tuple) and not are_samples(values, sizes):
            raise _CannotBeJoined
        return [move_data_to_device(item, device) for value in values for item in value]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: _join([value[key] for value in values], sizes, device) for key in first}
    if isinstance(first, (bool, str, type(None))) and all(value == first for value in values):
        return first
    raise _CannotBeJoined


def _are_parts(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists or tuples hold several things for all samples of the shard, (target, weight or None) say."""
    items = [item for value in values for item in value]
    if are_samples(values, sizes) or any(isinstance(item, dict) for item in items):
        return False
    tensors = [(leaf, size) for value, size in zip(values, sizes) for leaf in leaves(value) if leaf is not None]
    return bool(tensors) and all(isinstance(t, Tensor) and t.ndim and len(t) == size for t, size in tensors)


class _CannotBeJoined(Exception):
    pass


def _aggregated(
    metric: BaseAggregator, arguments: list[tuple[tuple, dict[str, Any]]], sizes: Sequence[int], device: torch.device
) -> list[Any]:
    """Arguments for one update of a torchmetrics aggregator, `value` and `weight`, from those with numbers in them."""
    given = [dict(zip(("value", "weight"), args)) | kwargs for args, kwargs in arguments]
    values = [torch.as_tensor(each["value"], device=device) for each in given]
    # torchmetrics' default where it is given: it weighs every batch alike, while a count would be no float
    are_defaults = all(type(each.get("weight")) is float and each["weight"] == 1.0 for each in given)
    if "weight" in given[0] and (not are_defaults or any(value.ndim for value in values)):
        weights = [torch.as_tensor(each["weight"], device=device).expand_as(v) for each, v in zip(given, values)]
        return [torch.cat([value.reshape(-1) for value in parts]) for parts in (values, weights)]
    if isinstance(metric, SumMetric):
        return [_reduced(values, sizes, "sum", device)]
    if isinstance(metric, (MaxMetric, MinMetric)):
        return [_reduced(values, sizes, "max" if isinstance(metric, MaxMetric) else "min", device)]
    return [_reduced(values, sizes, "mean", device)]


def _reduced(values: list[Any], weights: Sequence[float], reduce_fx: Any, device: torch.device) -> Any:
    """The value for the whole batch, of one for each shard: how, says `self.log(reduce_fx=...)`."""
    if isinstance(values[0], dict):
        return {key: _reduced([value[key] for value in values], weights, reduce_fx, device) for key in values[0]}
    if len(values) == 1 or not all(isinstance(value, (Tensor, Number)) for value in values):
        return move_data_to_device(values[0], device)
    kind = (
        reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    ).lower()  # of torch.mean, max
    if kind in ("mean", "avg"):
        if isinstance(values[0], Tensor):
            values = [_widened(_as_tensor(value, device)) for value in values]
        return weighted_mean(values, weights)
    stacked = torch.stack([_as_tensor(value, device) for value in values])
    if kind == "sum":
        return stacked.sum(0)
    if kind in ("max", "amax", "min", "amin"):
        return stacked.amax(0) if "max" in kind else stacked.amin(0)
    return values[0]  # for Lightning to refuse


def _as_tensor(value: Any, device: torch.device) -> Tensor:
    return value.to(device) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.get_default_dtype())


def _widened(value: Tensor) -> Tensor:
    """For a mean: half precision would round it, integers have none."""
    if value.is_floating_point():
        return value.float() if value.itemsize < 4 else value
    return value.to(torch.get_default_dtype())


def _aligned(lists: Sequence[Sequence[tuple[Any, Any]]]) -> dict[tuple[Any, int], list[tuple[int, Any]]]:
    """Group the n-th entry of a name by all replicas: {(name, n): [(replica, entry), ...]} in order of appearance."""
    groups: dict[tuple[Any, int], list[tuple[int, Any]]] = defaultdict(list)
    for replica, entries in enumerate(lists):
        seen: dict[Any, int] = defaultdict(int)
        for name, entry in entries:
            groups[name, seen[name]].append((replica, entry))
            seen[name] += 1
    return groups


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, Tensor) and not value.ndim) or (isinstance(value, Number) and not isinstance(value, bool))
