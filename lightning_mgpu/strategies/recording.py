"""What replicas log in a step, reduced once: values and torchmetrics equal those of one device with the whole batch.

While replicas run, `self.log` and the updates of torchmetrics objects are written down instead of done. Afterwards
they are done once, on the original module: logged values joined with the shard sizes as weights, metrics updated with
the shards' arguments put together. Equal by construction, for any metric, also one whose states cannot be merged.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_mgpu.strategies.shards import gather, weighted_mean


@dataclass
class Record:
    """What one replica did in a step: values logged, and updates of metrics, each in order."""

    logged: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    updates: list[tuple[str, str, tuple, dict[str, Any]]] = field(default_factory=list)


def outermost_metrics(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Metrics and collections by name, without those inside another one, whose affair they are."""
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection)):
            yield prefix + name, child
        else:
            yield from outermost_metrics(child, f"{prefix}{name}.")


class Recorder:
    """Records one replica, `module`; the metrics in it are not touched.

    What a metric's `forward` returns in the middle of a step is computed on a copy: the value for the shard.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.record = Record()
        self.metrics = dict(outermost_metrics(module))
        self.names = {id(child): name for name, child in module.named_modules() if isinstance(child, Metric)}
        self._copies = {name: cast(Metric, metric.clone()) for name, metric in self.metrics.items()}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write down instead of do."""
        self.record = Record()
        saved = {name: vars(metric).get("update") for name, metric in self.metrics.items()}
        vars(self.module)["log"] = self._log
        for name, metric in self.metrics.items():
            vars(metric).update(update=partial(self._update, name), forward=partial(self._forward, name))
        try:
            yield
        finally:
            del vars(self.module)["log"]
            for name, metric in self.metrics.items():
                del vars(metric)["forward"], vars(metric)["update"]
                if saved[name] is not None:  # a Metric keeps its wrapped update as an attribute of its own
                    vars(metric)["update"] = saved[name]

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args))
        if isinstance(value, Metric):
            value = _Logged(self.names[id(value)])
        self.record.logged.append((name, _detached(value), kwargs))

    def _update(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.record.updates.append((name, "update", _detached(args), _detached(kwargs)))

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.record.updates.append((name, "forward", _detached(args), _detached(kwargs)))
        metric = self._copies[name]
        metric.reset()
        metric.update(*args, **kwargs)
        return metric.compute()


@dataclass
class _Logged:
    """Stands for a metric object that was logged, by its name in the module."""

    name: str


def replay(module: LightningModule, records: Sequence[Record], sizes: Sequence[int]) -> None:
    """Do on the original `module` what replicas with shards of the given sizes recorded."""
    for (name, _), calls in _aligned([[(u[0], u) for u in record.updates] for record in records]).items():
        _update_metric(module.get_submodule(name), calls, sizes, module.device)
    for (name, _), calls in _aligned([[(entry[0], entry) for entry in record.logged] for record in records]).items():
        values = [entry[1] for _, entry in calls]
        kwargs = dict(calls[0][1][2])
        weights = [float(entry[2].get("batch_size") or sizes[i]) for i, entry in calls]
        if kwargs.get("batch_size") is not None:
            kwargs["batch_size"] = sum(entry[2]["batch_size"] for _, entry in calls)
        if isinstance(values[0], _Logged):
            module.log(name, module.get_submodule(values[0].name), **kwargs)  # type: ignore[arg-type]
        else:
            module.log(name, _reduced(values, weights, kwargs.get("reduce_fx", "mean"), module.device), **kwargs)


def _update_metric(metric: nn.Module, calls: list[tuple[int, Any]], sizes: Sequence[int], device: torch.device) -> None:
    """One update with the shards' arguments put together."""
    method = getattr(metric, "__call__" if calls[0][1][1] == "forward" else "update")
    sizes = [sizes[i] for i, _ in calls]
    arguments = [(args, kwargs) for _, (_, _, args, kwargs) in calls]
    values = [value for args, kwargs in arguments for value in (*args, *kwargs.values())]
    sums_up = isinstance(metric, SumMetric) or (isinstance(metric, BaseAggregator) and len(arguments[0][0]) > 1)
    has_weight = isinstance(metric, BaseAggregator) and (sums_up or "weight" in arguments[0][1])
    if has_weight and not any(isinstance(value, Tensor) and value.ndim for value in values):
        for args, kwargs in arguments:  # numbers with their own weights, and sums: exact one by one
            method(*move_data_to_device(args, device), **move_data_to_device(kwargs, device))
    else:
        args, kwargs = gather(arguments, sizes, device)
        method(*args, **kwargs)


def _reduced(values: list[Any], weights: list[float], reduce_fx: Any, device: torch.device) -> Any:
    tensors = [torch.as_tensor(value, device=device) for value in values]
    kind = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__  # torch.mean, sum, max, ...
    if kind == "mean":
        tensors = [tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype()) for tensor in tensors]
        return weighted_mean(tensors, weights)
    stacked = torch.stack(tensors)
    return {"sum": stacked.sum, "max": stacked.amax, "amax": stacked.amax, "min": stacked.amin, "amin": stacked.amin}[
        kind
    ](0)


def _aligned(lists: list[list[tuple[str, Any]]]) -> dict[tuple[str, int], list[tuple[int, Any]]]:
    """Group the n-th call of a name by all replicas: {(name, n): [(replica, call), ...]} in order of appearance."""
    groups: dict[tuple[str, int], list[tuple[int, Any]]] = defaultdict(list)
    for replica, calls in enumerate(lists):
        seen: dict[str, int] = defaultdict(int)
        for name, call in calls:
            groups[name, seen[name]].append((replica, call))
            seen[name] += 1
    return groups


def _detached(value: Any) -> Any:
    """Values as they are now: without graph, and safe from later changes in place of numbers."""
    return apply_to_collection(
        value, Tensor, lambda tensor: tensor.detach() if tensor.ndim else tensor.detach().clone()
    )
