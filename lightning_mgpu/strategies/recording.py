"""What replicas log in a step, and give to metrics, reaches the Trainer and the metrics once, with the whole batch.

While replicas run, `self.log` and the calls of torchmetrics objects are written down. Afterwards they are done once:
logged values joined with the shards' sizes as weights, metrics updated with the shards' arguments put together.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from numbers import Number
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from lightning_mgpu.strategies.gather import gather, weighted_mean
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.split_batch import leaves

METHODS = ("update", "forward", "compute", "reset")
TO_TENSOR = "_LightningModule__to_tensor"  # private: `self.log` makes a tensor of its value by this method
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
        self._copies: dict[int, Any] = {}  # by a metric's id: a copy of it for single shards
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
        look_up = lambda metric, name: self._look_up(metric, name)  # noqa: E731 - a function becomes a method
        new: list[tuple[Any, str, Any]] = [(cls, "__getattribute__", look_up) for cls in (Metric, MetricCollection)]
        new.append((module, TO_TENSOR, self._to_tensor))
        if results is not None:
            self._log = results.log
            new.append((results, "log", self._record_log))
        self.sizes, self.is_recording = sizes, True
        try:
            with replaced(new):
                yield
            self.is_recording = False
            self._replay()
        finally:
            self.is_recording = False
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

    def _look_up(self, metric: Any, name: str) -> Any:
        """An attribute of a metric. While replicas run, its methods are these."""
        if name not in METHODS or not self.is_recording:
            return object.__getattribute__(metric, name)
        return partial(self._compute, metric) if name == "compute" else partial(self._record, metric, name)

    def _record(self, metric: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """What `forward` answers a replica is the value for its shard."""
        i = self.replicas.current
        key = id(metric), method, self._count(i, id(metric), method)
        call = Call(metric, method, args, kwargs)
        self._calls.setdefault(key, {})[i] = apply_to_collection(call, Tensor, lambda t: t.detach().clone())
        if method != "forward":
            return None
        with self._not_recording():
            value = self._copy_of(metric)(*args, **kwargs)
        for name, part in value.items() if isinstance(value, dict) else [(None, value)]:
            self._sources[id(part)] = key, name, part
        return value

    def _count(self, *what: Any) -> int:
        self._counts[what] += 1
        return self._counts[what] - 1

    def _copy_of(self, metric: Any) -> Any:
        """A copy without states, on the device of the replica. What the user keeps on the CPU stays there."""
        if id(metric) not in self._copies:
            copied = self._copies[id(metric)] = copy.deepcopy(metric)
            weakref.finalize(metric, self._copies.pop, id(metric), None)
            if isinstance(copied, MetricCollection):
                copied._enable_compute_groups = False  # private: two may be equal for a shard, but not for the batch
        copied = self._copies[id(metric)]
        copied.reset()
        home, kinds = self.replicas.devices[0].type, {m.device.type for m in metric.modules() if isinstance(m, Metric)}
        return copied if home not in kinds else copied.to(self.replicas.module.device)

    def _compute(self, metric: Any) -> Any:
        """Replicas meet for it: all of them must have updated the metric."""
        if self.lockstep.running is None:
            raise RuntimeError(
                f"{type(metric).__name__}.compute() in a step needs what all replicas have seen: set lockstep=True "
                "(--trainer.strategy.lockstep=true), or compute it when the epoch ends."
            )

        def compute(_: Any) -> Any:
            with self._not_recording():
                self._replay_calls()
                return metric.compute()

        value = self.lockstep.meet(("compute()", id(metric)), None, compute)
        return move_data_to_device(value, self.replicas.module.device)

    @contextmanager
    def _not_recording(self) -> Iterator[None]:
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = True

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
            if source is not None and all(other and other[:2] == source[:2] for *_, other in entries):
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
        tells = len({*given}) > 1 or len({*sizes}) > 1 or given[0] % sizes[0] or given[0] == total
        if tells and len(given) > 1:
            was_count = self._is_constant.get(name) is False  # counts may be equal by chance
            self._is_constant[name] = len({*given}) == 1 and not was_count  # else either: shards of one size
        is_constant = self._is_constant.get(name, False)
        return (sizes, given[0]) if is_constant else (given, sum(given))

    def _replay_calls(self) -> None:
        for key, by_replica in self._calls.items():
            self._values[key] = self._do(list(by_replica.values()), [self.sizes[i] for i in by_replica])
        self._calls.clear()

    def _do(self, calls: Sequence[Call], sizes: Sequence[int]) -> Any:
        """One call with the shards' arguments put together."""
        metric, method, *_ = calls[0]
        if method == "reset":
            return metric.reset()
        device = self.replicas.devices[0]
        with suppress(ValueError):
            args, kwargs = _joined(calls, sizes, device)
            return metric(*args, **kwargs) if method == "forward" else metric.update(*args, **kwargs)
        if method == "forward":
            raise RuntimeError(
                f"{type(metric).__name__} is given numbers, or tensors of other shapes for each shard: call its "
                "update(), which replicas then do one after the other, and log the metric itself."
            )
        for call in calls:
            metric.update(*move_data_to_device(call.args, device), **move_data_to_device(call.kwargs, device))
        return None


@contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects other attributes inside the block."""
    with ExitStack() as stack:
        for owner, name, value in attributes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def _joined(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for the whole batch.

    Raises:
        ValueError: If they cannot be joined, or are numbers for a metric of which nobody knows what it does with them.
    """
    join: Callable[[Sequence[Any]], Any] = partial(gather, sizes=sizes, device=device, are_rows=True)
    if any(_is_number(leaf) for call in calls for leaf in leaves([call.args, call.kwargs])):
        metric = getattr(calls[0].metric, "base_metric", calls[0].metric)
        if not isinstance(metric, BaseAggregator):
            raise ValueError("numbers")
        weights = [call.kwargs.get("weight", [*call.args, 1.0, 1.0][1]) for call in calls]
        weighs_alike = len({*weights}) == 1 and isinstance(weights[0], float)  # every batch
        is_mean = isinstance(metric, MeanMetric) and weighs_alike
        join = partial(gather, sizes=sizes, device=device) if is_mean else partial(_stacked, device=device)
    args, kwargs = zip(*(call[2:] for call in calls))
    joined = [join(parts) for parts in zip(*args, strict=True)]
    return joined, {name: join([each[name] for each in kwargs]) for name in kwargs[0]}


def _stacked(numbers: Sequence[Any], device: torch.device) -> Tensor:
    tensors = [torch.as_tensor(number, device=device) for number in numbers]
    if any(tensor.ndim for tensor in tensors):
        raise ValueError("a number beside rows")
    return torch.stack(tensors)


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
