"""What replicas log in a step, and give to metrics, reaches the Trainer and the metrics once, with the whole batch.

While replicas run, `self.log` and the calls of torchmetrics objects are written down. Afterwards they are done once:
logged values joined with the shards' sizes as weights, metrics updated with the shards' arguments put together.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.aggregation import BaseAggregator

from lightning_mgpu.strategies.gather import gather, weighted_mean
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.split_batch import leaves

METHODS = ("update", "forward", "compute", "reset")
TO_TENSOR = "_LightningModule__to_tensor"  # private: `self.log` makes a tensor of its value by this method
BUILT_IN = frozenset(vars(LightningModule()))
FOREIGN = (
    "torch",
    "lightning",
    "lightning_utilities",
    "numpy",
    "builtins",
    "functools",
)  # theirs hold none
Key = tuple[int, str, int]  # a metric's id, its method, and how many such calls the replica had made before


class Call(NamedTuple):
    """A call of a metric."""

    metric: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Logged(NamedTuple):
    """A call of `self.log`. The source is the metric's call that has returned the value, and its place in a dict."""

    value: Any
    kwargs: dict[str, Any]
    source: tuple[Key, Any] | None


class Recorder:
    """Writes down what replicas do in a step, and does it once when they are through. They compute in `lockstep`."""

    def __init__(self, replicas: Replicas, lockstep: Lockstep) -> None:
        self.replicas, self.lockstep, self.is_recording = replicas, lockstep, False
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id: a metric, and a copy of it for single shards
        self._is_constant: dict[str, bool] = {}  # by name: whether `batch_size` is one number for all shards
        self._forget()

    def _forget(self) -> None:
        self._calls: dict[Key, dict[int, Call]] = {}  # by replica
        self._logged: dict[tuple[str, str, int], dict[int, Logged]] = {}  # by hook, name and number; by replica
        self._counts: dict[Any, int] = defaultdict(int)
        self._sources: dict[int, tuple[Key, Any, Tensor]] = {}  # by id: the call that has returned a tensor
        self._values: dict[Key, Any] = {}  # what calls return for the whole batch

    @contextmanager
    def recording(self, sizes: dict[int, int]) -> Iterator[None]:
        """Write down instead of do, and do it when the block has ended. `sizes` are the samples of the shards."""
        module = self.replicas.module
        results: Any = module.trainer._results  # private: where `self.log` puts values; None in `predict`
        patches: list[tuple[Any, str, Any]] = [(module, TO_TENSOR, self._to_tensor)]
        for metric in find_metrics(module):
            patches += [(metric, method, _Recorded(self, metric, method)) for method in METHODS]
        if results is not None:
            self._log = results.log
            patches.append((results, "log", self._record_log))
        self.sizes, self.is_recording = sizes, True
        try:
            with attributes(patches):
                yield
            self._replay()
        finally:
            self._forget()

    # Written down

    def _record_log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        i, source = self.replicas.current, self._sources.get(id(value))
        n = self._count(i, fx, name)
        self._logged.setdefault((fx, name, n), {})[i] = Logged(value, kwargs, source and source[:2])

    def _to_tensor(self, value: Any, name: str) -> Tensor:
        made: Tensor = getattr(LightningModule, TO_TENSOR)(self.replicas.module, value, name)
        if (source := self._sources.get(id(value))) is not None:
            self._sources[id(made)] = *source[:2], made
        return made

    def call(self, metric: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """A replica calls a metric. What `forward` answers is the value for its shard."""
        if method == "compute":
            if not self.lockstep.is_inside:
                raise RuntimeError(
                    f"{type(metric).__name__}.compute() in a step needs what all replicas have seen: set lockstep=True "
                    "(--trainer.strategy.lockstep=true), or compute it when the epoch ends."
                )
            value = self.lockstep.meet(("compute()", id(metric)), None, lambda _: self._compute(metric))
            return move_data_to_device(value, self.replicas.module.device)
        key = id(metric), method, self._count(self.replicas.current, id(metric), method)
        now = [apply_to_collection(part, Tensor, lambda t: t.detach().clone()) for part in (args, kwargs)]
        self._calls.setdefault(key, {})[self.replicas.current] = Call(metric, method, *now)
        if method != "forward":
            return None
        value = self._value_of_shard(metric, args, kwargs)
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            self._sources[id(part)] = key, name, part
        return value

    def _count(self, *what: Any) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def _value_of_shard(self, metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copied = self._copy_of(metric)
        with suppress(Exception):  # too few samples in the shard, but not in the batch
            return copied(*args, **kwargs)
        nan = torch.tensor(torch.nan)
        return {str(name): nan.clone() for name in copied} if isinstance(copied, MetricCollection) else nan

    def _copy_of(self, metric: Any) -> Any:
        """A copy that has seen nothing, without hooks, which may lead anywhere."""
        if id(metric) not in self._copies:
            hooks = [own for part in metric.modules() for name, own in vars(part).items() if name.endswith("_hooks")]
            copied = copy.deepcopy(metric, {id(own): type(own)() for own in hooks})
            if isinstance(copied, MetricCollection):
                copied._enable_compute_groups = False  # private: two may be equal for a shard, but not for the batch
            self._copies[id(metric)] = metric, copied
        copied = self._copies[id(metric)][1]
        copied.reset()
        on_cpu = all(part.device.type == "cpu" for part in metric.modules() if isinstance(part, Metric))
        return copied if on_cpu else copied.to(self.replicas.module.device)

    # Done

    def _compute(self, metric: Any) -> Any:
        self.is_recording = False
        try:
            self._replay_calls()
            return metric.compute()
        finally:
            self.is_recording = True

    def _replay(self) -> None:
        self._replay_calls()
        for (fx, name, _), by_replica in self._logged.items():
            (value, kwargs, source), *_ = entries = list(by_replica.values())
            sizes = weights = [self.sizes[i] for i in by_replica]
            if kwargs.get("batch_size") is not None:
                given = [entry.kwargs["batch_size"] for entry in entries]
                weights, batch_size = self._batch_size(name, given, sizes)
                kwargs = {**kwargs, "batch_size": batch_size}
            if source is not None:
                key, part = source
                value = self._values[key] if part is None else self._values[key][part]
            elif isinstance(value, Tensor):
                values = [entry.value.to(self.replicas.devices[0]) for entry in entries]
                value = _reduced(values, weights, kwargs.get("reduce_fx", "mean"))
            self._log(fx, name, value, **kwargs)

    def _batch_size(self, name: str, given: list[int], sizes: list[int]) -> tuple[list[int], int]:
        """The weights of the shards, and the whole batch's `batch_size`: a count adds up, a constant stays."""
        if len({*given}) > 1 or len({*sizes}) > 1 or given[0] % sizes[0] or given[0] == sum(sizes):
            self._is_constant[name] = len({*given}) == 1  # else it may be either: shards of one size
        is_constant = self._is_constant.get(name, False)
        return (sizes, given[0]) if is_constant else (given, sum(given))

    def _replay_calls(self) -> None:
        for key, by_replica in self._calls.items():
            self._values[key] = self._do(list(by_replica.values()), [self.sizes[i] for i in by_replica])
        self._calls.clear()

    def _do(self, calls: Sequence[Call], sizes: Sequence[int]) -> Any:
        """One call with the shards' arguments put together. Numbers, which a metric may add up, come one by one."""
        metric, method, *_ = calls[0]
        if method == "reset":
            return metric.reset()
        device = self.replicas.devices[0]
        call = metric if method == "forward" else metric.update
        if isinstance(inner := getattr(metric, "base_metric", metric), BaseAggregator):
            return call(*_aggregated(inner, calls, sizes, device))
        with suppress(ValueError):
            args, kwargs = _joined(calls, sizes, device)
            return call(*args, **kwargs)
        moved = [(move_data_to_device(each.args, device), move_data_to_device(each.kwargs, device)) for each in calls]
        if method == "update" or type(metric).forward not in (Metric.forward, MetricCollection.forward):
            return gather([call(*args, **kwargs) for args, kwargs in moved], sizes, device)
        copied = self._copy_of(metric)  # for the value of this batch alone
        for args, kwargs in moved:
            copied.update(*args, **kwargs)
            metric.update(*args, **kwargs)
        for part, its_copy in zip(metric.modules(), copied.modules()):
            if isinstance(part, Metric):
                part._forward_cache = its_copy.compute()  # private: what is logged of the step
        return copied.compute()


class _Recorded:
    """Stands in for a method of a metric. A copy of the metric has the method itself."""

    def __init__(self, recorder: Recorder, metric: Any, method: str) -> None:
        self.recorder, self.metric, self.method, self.itself = recorder, metric, method, getattr(metric, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recorder.is_recording:
            return self.itself(*args, **kwargs)
        return self.recorder.call(self.metric, self.method, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return partial(getattr(type(self.metric), self.method), copy.deepcopy(self.metric, memo))


def find_metrics(module: nn.Module) -> list[Any]:
    """Every metric and collection, those in plain lists, dicts and objects, too."""
    found: dict[int, Any] = {}
    for owner in module.modules():
        if isinstance(owner, (Metric, MetricCollection)):
            found[id(owner)] = owner
        elif not type(owner).__module__.startswith("torch."):
            values = [value for name, value in vars(owner).items() if name not in BUILT_IN]
            found.update({id(metric): metric for metric in _metrics_in(values)})
    return list(found.values())


def _metrics_in(value: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from (part for part in value.modules() if isinstance(part, (Metric, MetricCollection)))
    elif isinstance(value, (list, tuple, Mapping)) or type(value).__module__.split(".")[0] not in FOREIGN:
        items = value.values() if isinstance(value, Mapping) else value
        items = items if isinstance(value, (list, tuple, Mapping)) else getattr(value, "__dict__", {}).values()
        for item in list(items)[:100] if depth else ():
            yield from _metrics_in(item, depth - 1)


@contextmanager
def attributes(new: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects attributes of their own inside the block."""
    before = [(vars(owner), name, vars(owner).get(name, _Recorded)) for owner, name, _ in new]
    for owner, name, value in new:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            if value is not _Recorded:
                own[name] = value


def _joined(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for the whole batch; a ValueError if some are numbers, or cannot be joined."""
    if any(_is_number(leaf) for call in calls for leaf in leaves([call.args, call.kwargs])):
        raise ValueError("numbers")
    args, kwargs = zip(*(call[2:] for call in calls))
    joined = [gather(parts, sizes, device, are_rows=True) for parts in zip(*args, strict=True)]
    return joined, {n: gather([each[n] for each in kwargs], sizes, device, are_rows=True) for n in kwargs[0]}


def _aggregated(metric: Any, calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> list[Any]:
    """The value for the whole batch, and its weight, for a metric that aggregates values of single shards."""
    given = [dict(zip(("value", "weight"), call.args)) | call.kwargs for call in calls]
    values = [torch.as_tensor(each["value"], device=device) for each in given]
    if any(value.ndim for value in values):
        rows = [value.reshape(-1) for value in values]
        if "weight" not in given[0]:
            return [torch.cat(rows)]
        weights = [torch.as_tensor(each["weight"], device=device).expand_as(v) for each, v in zip(given, values)]
        return [torch.cat(rows), torch.cat([weight.reshape(-1) for weight in weights])]
    kinds = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
    kind = next((kind for base, kind in kinds.items() if isinstance(metric, base)), "mean")
    weight = [gather([each["weight"] for each in given], sizes, device)] if "weight" in given[0] else []
    return [_reduced(values, sizes, kind), *weight]


def _reduced(values: Sequence[Tensor], weights: Sequence[float], reduce_fx: Any) -> Tensor:
    """The whole batch's value, of one for each shard: how, says `self.log(reduce_fx=...)`."""
    kind = (reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")).lower()
    stacked = torch.stack(list(values))
    if kind in ("mean", "avg"):  # half precision would round a mean, and integers have none
        wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        return weighted_mean(list(wide), weights)  # type: ignore[no-any-return]
    if kind == "sum":
        return stacked.sum(0)
    if kind in ("max", "amax", "min", "amin"):
        return stacked.amax(0) if "max" in kind else stacked.amin(0)
    return values[0]  # for Lightning to refuse


def _is_number(leaf: Any) -> bool:
    return (isinstance(leaf, Tensor) and not leaf.ndim) or (isinstance(leaf, Number) and not isinstance(leaf, bool))
