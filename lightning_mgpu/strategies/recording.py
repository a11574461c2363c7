"""What replicas log in a step, and give to metrics, reaches the Trainer and the metrics once, with the whole batch.

While replicas run, `self.log` and the calls of torchmetrics objects are written down. Afterwards they are done once:
logged values joined with the shards' sizes as weights, metrics updated with the shards' arguments put together.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from numbers import Number
from operator import getitem
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator
from torchmetrics.wrappers import Running

from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.replicas import MISSING, Replicas
from lightning_mgpu.strategies.split_batch import gather, leaves, weighted_mean

METRICS = (Metric, MetricCollection)
METHODS = ("update", "forward", "compute", "reset")
TO_TENSOR = (
    "_LightningModule__to_tensor"  # private: `self.log` makes a tensor of its value by this method
)
BUILT_IN = frozenset(vars(LightningModule()))
Key = tuple[
    Any, str, int
]  # a metric's id or a hook's name, a method or a name, and how many such before


class Call(NamedTuple):
    """What a replica has called: a method of a metric, or `self.log`."""

    metric: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """Writes down what replicas do in a step, and does it once when they are through."""

    def __init__(self, replicas: Replicas, lockstep: Lockstep) -> None:
        self.replicas, self.lockstep = replicas, lockstep
        self._copies: dict[
            int, tuple[Any, Any]
        ] = {}  # by id: a metric, and a copy of it for single shards
        self._with_rows: set[tuple[int, Any, int]] = (
            set()
        )  # by a metric's id: names of arguments, and places in them
        self._forget()

    def _forget(self) -> None:
        self.is_recording = False
        self._calls: dict[Key, dict[int, Call]] = {}  # by replica
        self._counts: dict[Any, int] = defaultdict(int)
        # `self.log("f1", self.f1(Z, y))`: by the id of a tensor that `forward` has returned, the call and its place
        self._sources: dict[int, tuple[Key, tuple[Any, ...], Tensor]] = {}
        self._values: dict[Key, Any] = {}  # what calls return for the whole batch

    @contextmanager
    def recording(self, sizes: dict[int, int]) -> Iterator[None]:
        """Write down instead of do, and do it when the block has ended. `sizes` are the samples of the shards."""
        module = self.replicas.module
        results: Any = (
            module.trainer._results
        )  # private: where `self.log` puts values; None in `predict`
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

    def _write(self, what: Any, name: str, call: Call) -> Key:
        i = self.replicas.current
        key = what, name, self._counts[i, what, name]
        self._counts[i, what, name] += 1
        self._calls.setdefault(key, {})[i] = call
        return key

    def _record_log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        self._write(fx, name, Call(None, "log", (value, self._sources.get(id(value))), kwargs))

    def _to_tensor(self, value: Any, name: str) -> Any:
        if self.is_recording and not isinstance(value, Tensor):
            return value  # a number: its way to the device is one copy for the whole batch
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
            if method == "compute":
                return self._compute(metric)
            written = Call(
                metric,
                method,
                *apply_to_collection((args, kwargs), Tensor, lambda t: t.detach().clone()),
            )
            key = self._write(id(metric), method, written)
            return self._for_the_shard(metric, key, args, kwargs) if method == "forward" else None

        return call

    def _for_the_shard(self, metric: Any, key: Key, args: Any, kwargs: Any) -> Any:
        """What `forward` answers a replica. NaN where the shard has too few samples."""
        value: Any = None
        with suppress(Exception):
            value = self._blank(metric)(*args, **kwargs)
        if value is None:
            names = metric.keys() if isinstance(metric, MetricCollection) else ()
            value = {name: torch.tensor(torch.nan) for name in names} or torch.tensor(torch.nan)
        value = apply_to_collection(value, Tensor, Tensor.clone)  # one may stand under two names
        self._sources |= {id(part): (key, path, part) for path, part in _paths(value)}
        return value

    def _blank(self, metric: Any) -> Any:
        """A copy without samples."""
        copied = self._copies[id(metric)][1]
        copied.reset()
        home, kinds = (
            self.replicas.devices[0].type,
            {m.device.type for m in metric.modules() if isinstance(m, Metric)},
        )
        return (
            copied.to(self.replicas.module.device) if home in kinds else copied
        )  # on the CPU, by the user

    def _compute(self, metric: Any) -> Any:
        """Replicas meet for it: all of them must have updated the metric."""
        if self.lockstep.running is None:
            raise RuntimeError(
                f"{type(metric).__name__}.compute() in a step needs what all replicas have seen: set lockstep=True "
                "(--trainer.strategy.lockstep=true), or compute it when the epoch ends."
            )

        def compute(_: Any) -> Any:
            self._replay()
            self.is_recording = False
            value = metric.compute()
            self.is_recording = True
            return value

        value = self.lockstep.meet(("compute()", id(metric)), None, compute)
        return move_data_to_device(value, self.replicas.module.device)

    # Done

    def _replay(self) -> None:
        """The metrics' calls go first: what is logged of them may have come before, in a replica that made no call."""
        self.is_recording = False
        for key, by_replica in sorted(
            self._calls.items(), key=lambda item: isinstance(item[0][0], str)
        ):
            by_replica = dict(sorted(by_replica.items()))  # whatever the order in which they ran
            calls, sizes = list(by_replica.values()), [self.sizes[i] for i in by_replica]
            if calls[0].method == "log":
                self._do_log(*key[:2], calls, sizes)
            else:
                self._values[key] = self._do(calls, sizes)
        self._calls.clear()
        self.is_recording = True

    def _do_log(self, fx: str, name: str, calls: Sequence[Call], sizes: list[int]) -> None:
        """`batch_size` is a count of the shard's: it adds up."""
        (value, source), kwargs = calls[0][2:]
        if kwargs.get("batch_size") is not None:
            given = [call.kwargs["batch_size"] for call in calls]
            kwargs = {**kwargs, "batch_size": sum(given)}
            sizes = given if len({*given}) > 1 else sizes
        if source is not None:
            key, path, _ = source
            value = reduce(getitem, path, self._values[key])
        elif isinstance(value, (Tensor, Number)):
            home = self.replicas.devices[0]
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # as Lightning
            values = [call.args[0] for call in calls]
            if all(isinstance(value, Tensor) for value in values):
                values = [value.to(home) for value in values]
            else:
                values = [torch.as_tensor(value, dtype=dtype, device="cpu") for value in values]
            value = _reduced(values, sizes, kwargs.get("reduce_fx", "mean")).to(home)
        self._log(fx, name, value, **kwargs)

    def _do(self, calls: Sequence[Call], sizes: Sequence[int]) -> Any:
        """One call with the shards' arguments put together; one a shard where they do not fit together."""
        metric, method, *_ = calls[0]
        if method == "reset":
            return metric.reset()
        device = self.replicas.devices[0]
        joined = None if self._have_one_for_all(calls, sizes) else _joined(calls, sizes, device)
        if joined is not None:
            return (metric if method == "forward" else metric.update)(*joined[0], **joined[1])
        copied = self._blank(metric)  # for the value of this batch alone
        for call in calls:
            args, kwargs = move_data_to_device((call.args, call.kwargs), device)
            metric.update(*args, **kwargs)
            if method == "forward":
                copied.update(*args, **kwargs)
        if method == "update":
            return None
        value = copied.compute()  # before its parts: a wrapper computes with them
        for part, its_copy in zip(metric.modules(), copied.modules()):
            if isinstance(part, Metric):
                part._forward_cache = (
                    value if its_copy is copied else its_copy.compute()
                )  # private: what is logged
        return value

    def _have_one_for_all(self, calls: Sequence[Call], sizes: Sequence[int]) -> bool:
        """Whether an argument may be one tensor for all samples, for example weights of classes.

        Then replicas have given equal tensors, not as long as their shards. Once they have given
        others the argument is known to have rows of samples, and no step waits for the answer.
        """
        named = [{**dict(enumerate(call.args)), **call.kwargs} for call in calls]
        for name in named[0]:
            for n, tensors in enumerate(zip(*(list(leaves(each.get(name))) for each in named))):
                key = id(calls[0].metric), name, n
                is_unlike_shards = all(isinstance(t, Tensor) and t.ndim for t in tensors) and (
                    [len(tensor) for tensor in tensors] != list(sizes)
                )
                if is_unlike_shards and key not in self._with_rows:
                    first, *others = tensors
                    if all(torch.equal(first, other.to(first.device)) for other in others):
                        return True
                    self._with_rows.add(key)
        return False

    def forget_rows(self) -> None:
        """Compare arguments again: in the next epoch another one may have this name."""
        self._with_rows.clear()


def find_metrics(module: nn.Module) -> list[Any]:
    """Every metric and collection, those in plain lists, dicts and objects, too."""
    found: dict[int, Any] = {}
    for owner in module.modules():
        if isinstance(owner, METRICS):
            found[id(owner)] = owner
        elif not type(owner).__module__.startswith("torch."):
            values = [value for name, value in vars(owner).items() if name not in BUILT_IN]
            found.update({id(metric): metric for metric in _metrics_in(values)})
    return list(found.values())


def _metrics_in(value: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from (part for part in value.modules() if isinstance(part, METRICS))
    elif depth:
        mapping = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        items = value if isinstance(value, (list, tuple)) else mapping.values()
        for item in list(items)[:100]:
            yield from _metrics_in(item, depth - 1)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor in a metric's answer, and the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(part, (*path, key))


def _blank_copy(metric: Any) -> Any:
    held = [
        leaf
        for part in metric.modules()
        for leaf in leaves(dict(vars(part)))
        if isinstance(leaf, Tensor)
    ]
    copied = copy.deepcopy(
        metric, {id(state): state.detach().clone() for state in held}
    )  # no graph can be copied
    if isinstance(copied, MetricCollection):
        copied._enable_compute_groups = (
            False  # private: two may be equal for a shard, but not for the batch
        )
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


def _joined(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> Any:
    """The arguments for the whole batch. None if they cannot be put together."""
    given = [{**dict(enumerate(call.args)), **call.kwargs} for call in calls]
    columns = {name: [each.get(name) for each in given] for name in given[0]}
    if any(
        all(map(_is_number, found)) for parts in columns.values() if (found := list(leaves(parts)))
    ):
        return _aggregated(calls, sizes, device)
    try:
        joined = {
            name: gather(parts, sizes, device, are_rows=True) for name, parts in columns.items()
        }
    except ValueError:
        return None
    return [joined.pop(n) for n in range(len(calls[0].args))], joined


def _aggregated(calls: Sequence[Call], sizes: Sequence[int], device: torch.device) -> Any:
    """The numbers of the shards for an aggregator, and their weights where it is a mean."""
    metric, given = (
        calls[0].metric,
        [dict(zip(("value", "weight"), call.args)) | call.kwargs for call in calls],
    )
    kind = metric.base_metric if isinstance(metric, Running) else metric
    if not isinstance(kind, BaseAggregator):
        return None
    values = [torch.as_tensor(each["value"], device=device) for each in given]
    if any(value.ndim for value in values):
        return None
    if not isinstance(kind, MeanMetric):
        return [torch.stack(values)], {}
    weights = [each.get("weight", 1.0) for each in given]
    if len({*weights}) == 1 and isinstance(weights[0], float):  # it weighs every batch alike
        weights = [weight * size / sum(sizes) for weight, size in zip(weights, sizes)]
    return [torch.stack(values), torch.as_tensor(weights, device=device)], {}


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
    return (isinstance(leaf, Tensor) and not leaf.ndim) or (
        isinstance(leaf, Number) and not isinstance(leaf, bool)
    )
