"""What replicas log in a step, and give to metrics, reaches the Trainer and the metrics once, with the whole batch.

While replicas run, `self.log` and the calls of torchmetrics objects are written down. Afterwards they are done once:
logged values joined with the shards' sizes as weights, metrics updated with the shards' arguments put together.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Number
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from lightning_mgpu.strategies.gather import gather, weighted_mean
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.replicas import MISSING, Replicas
from lightning_mgpu.strategies.split_batch import leaves

METHODS = ("update", "forward", "compute", "reset")
TO_TENSOR = "_LightningModule__to_tensor"  # private: `self.log` makes a tensor of its value by this method
BUILT_IN = frozenset(vars(LightningModule()))
Key = tuple[int, str, int]  # a metric's id, its method, and how many such calls the replica had made before


class Call(NamedTuple):
    """A call of a metric."""

    metric: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """Writes down what replicas do in a step, and does it once when they are through.

    `compute()` needs lockstep: all replicas must have updated the metric.
    """

    def __init__(self, replicas: Replicas, lockstep: Lockstep) -> None:
        self.replicas, self.lockstep, self.is_recording = replicas, lockstep, False
        self._copies: dict[int, tuple[Any, Any]] = {}  # by id: a metric, and a copy of it for single shards
        self._is_constant: dict[str, bool] = {}  # by name: whether `batch_size` is one number for all shards
        self._forget()

    def _forget(self) -> None:
        self._calls: dict[Key, dict[int, Call]] = {}  # by replica
        self._logged: dict[tuple[str, str, int], dict[int, tuple[Any, ...]]] = {}  # by hook, name, number; by replica
        self._counts: dict[Any, int] = defaultdict(int)
        # `self.log("f1", self.f1(Z, y))`: by the id of a tensor that `forward` has returned, the call and its place
        self._sources: dict[int, tuple[Key, Any, Tensor]] = {}
        self._values: dict[Key, Any] = {}  # what calls return for the whole batch

    @contextmanager
    def recording(self, sizes: dict[int, int]) -> Iterator[None]:
        """Write down instead of do, and do it when the block has ended. `sizes` are the samples of the shards."""
        module = self.replicas.module
        results: Any = module.trainer._results  # private: where `self.log` puts values; None in `predict`
        patches: list[tuple[Any, str, Any]] = [(module, TO_TENSOR, self._to_tensor)]
        for metric in find_metrics(module):
            if id(metric) not in self._copies:
                self._copies[id(metric)] = metric, _blank_copy(metric)
            patches += [(metric, method, self._recorded(metric, method)) for method in METHODS]
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
        i = self.replicas.current
        by_replica = self._logged.setdefault((fx, name, self._count(i, fx, name)), {})
        by_replica[i] = value, kwargs, self._sources.get(id(value))

    def _to_tensor(self, value: Any, name: str) -> Tensor:
        made: Tensor = getattr(LightningModule, TO_TENSOR)(self.replicas.module, value, name)
        if (source := self._sources.get(id(value))) is not None:
            self._sources[id(made)] = *source[:2], made
        return made

    def _recorded(self, metric: Any, method: str) -> Callable[..., Any]:
        """What stands in for a method of a metric."""
        itself = getattr(metric, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_recording:
                return itself(*args, **kwargs)
            return self._compute(metric) if method == "compute" else self._record(Call(metric, method, args, kwargs))

        return call

    def _record(self, call: Call) -> Any:
        """What `forward` answers a replica is the value for its shard."""
        i = self.replicas.current
        key = id(call.metric), call.method, self._count(i, id(call.metric), call.method)
        self._calls.setdefault(key, {})[i] = apply_to_collection(call, Tensor, lambda t: t.detach().clone())
        if call.method != "forward":
            return None
        value: Any = None
        with suppress(Exception):  # too few samples in the shard, but not in the batch
            value = self._copy_of(call.metric)(*call.args, **call.kwargs)
        if value is None:
            names = call.metric.keys() if isinstance(call.metric, MetricCollection) else ()
            value = {name: torch.tensor(torch.nan) for name in names} or torch.tensor(torch.nan)
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            self._sources[id(part)] = key, name, part
        return value

    def _count(self, *what: Any) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def _copy_of(self, metric: Any) -> Any:
        copied = self._copies[id(metric)][1]
        copied.reset()
        home, kinds = self.replicas.devices[0].type, {m.device.type for m in metric.modules() if isinstance(m, Metric)}
        return copied.to(self.replicas.module.device) if home in kinds else copied  # on the CPU, by the user

    def _compute(self, metric: Any) -> Any:
        """Replicas meet for it: all of them must have updated the metric."""
        if self.lockstep.running is None:
            raise RuntimeError(
                f"{type(metric).__name__}.compute() in a step needs what all replicas have seen: set lockstep=True "
                "(--trainer.strategy.lockstep=true), or compute it when the epoch ends."
            )

        def compute(_: Any) -> Any:
            self.is_recording = False
            try:
                self._replay_calls()
                return metric.compute()
            finally:
                self.is_recording = True

        value = self.lockstep.meet(("compute()", id(metric)), None, compute)
        return move_data_to_device(value, self.replicas.module.device)

    # Done

    def _replay(self) -> None:
        self._replay_calls()
        for (fx, name, _), by_replica in self._logged.items():
            (value, kwargs, source), *_ = entries = list(by_replica.values())
            sizes = weights = [self.sizes[i] for i in by_replica]
            if kwargs.get("batch_size") is not None:
                given = [kwargs["batch_size"] for _, kwargs, _ in entries]
                weights, batch_size = self._batch_size(name, given, sizes)
                kwargs = {**kwargs, "batch_size": batch_size}
            if source is not None:
                key, part, _ = source
                value = self._values[key] if part is None else self._values[key][part]
            elif isinstance(value, Tensor):
                values = [each.to(self.replicas.devices[0]) for each, *_ in entries]
                value = _reduced(values, weights, kwargs.get("reduce_fx", "mean"))
            self._log(fx, name, value, **kwargs)

    def _batch_size(self, name: str, given: list[int], sizes: list[int]) -> tuple[list[int], int]:
        """The weights of the shards, and the whole batch's `batch_size`.

        `batch_size=len(X)` is a count, which adds up. `batch_size=1` is a constant, which stays. They look alike where
        shards are equally long, so the last answer for this name counts.
        """
        total = sum(self.sizes.values())  # of those, too, that have not logged
        if len({*given}) > 1 or len({*sizes}) > 1 or given[0] % sizes[0] or given[0] == total:
            was_count = self._is_constant.get(name) is False  # counts may be equal by chance
            self._is_constant[name] = len({*given}) == 1 and not was_count  # else either: shards of one size
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
    elif depth:
        mapping = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        items = value if isinstance(value, (list, tuple)) else mapping.values()
        for item in list(items)[:100]:
            yield from _metrics_in(item, depth - 1)


def _blank_copy(metric: Any) -> Any:
    copied = copy.deepcopy(metric)
    if isinstance(copied, MetricCollection):
        copied._enable_compute_groups = False  # private: two may be equal for a shard, but not for the batch
    return copied


@contextmanager
def attributes(new: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects attributes of their own inside the block."""
    before = [(vars(owner), name, vars(owner).get(name, MISSING)) for owner, name, _ in new]
    for owner, name, value in new:
        vars(owner)[name] = value
    try:
        yield
    finally:
        for own, name, value in before:
            own.pop(name, None)
            if value is not MISSING:
                own[name] = value


def _joined(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments for the whole batch; a ValueError if some are numbers, or cannot be joined."""
    if any(_is_number(leaf) for call in calls for leaf in leaves([call.args, call.kwargs])):
        metric = getattr(calls[0].metric, "base_metric", calls[0].metric)
        return _aggregated(metric, calls, sizes, device), {}
    args, kwargs = zip(*(call[2:] for call in calls))
    joined = [gather(parts, sizes, device, are_rows=True) for parts in zip(*args, strict=True)]
    return joined, {n: gather([each[n] for each in kwargs], sizes, device, are_rows=True) for n in kwargs[0]}


def _aggregated(metric: Any, calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """The numbers of the shards, and their weights where the metric is a mean."""
    if not isinstance(metric, BaseAggregator):
        raise ValueError("nobody knows what its numbers are")
    given = [dict(zip(("value", "weight"), call.args)) | call.kwargs for call in calls]
    values = [torch.as_tensor(each["value"], device=device) for each in given]
    if any(value.ndim for value in values):
        raise ValueError("a number beside rows")
    if not isinstance(metric, MeanMetric):
        return [torch.stack(values)]
    weights = [each.get("weight", 1.0) for each in given]
    if len({*weights}) == 1 and isinstance(weights[0], float):  # it weighs every batch alike
        weights = [weight * size / sum(sizes) for weight, size in zip(weights, sizes)]
    return [torch.stack(values), torch.as_tensor(weights, device=device)]


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
