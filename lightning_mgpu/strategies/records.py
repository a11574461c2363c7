"""One record per replica of the results of its step. Combined, they are one device's step.

While replicas run, calls of `self.log` and of torchmetrics objects are written down. Afterwards
each call is made once.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from numbers import Number
from operator import getitem
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_mgpu.strategies.combining import reduce_logged
from lightning_mgpu.strategies.devices_and_attributes import replace_attributes
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.merging import Changes
from lightning_mgpu.strategies.metric_calls import Call, call_once
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.split_batch import leaves

METRICS = (Metric, MetricCollection)
METHODS = ("update", "forward", "compute", "reset")
TO_TENSOR = "_LightningModule__to_tensor"  # private: `self.log` makes a tensor of its value by this
Path = tuple[Any, ...]  # to a tensor in what a metric has returned


class Key(NamedTuple):
    """Which call this is of a replica's step. The same call has the same key in all replicas."""

    caller: Any  # the number of a metric, or the name of the hook that calls `self.log`
    name: str  # of the metric's method, or of what is logged
    num_before: int  # calls of the same caller and name


@dataclass
class Record:
    """The results of a replica's step."""

    size: int  # samples of its shard
    output: Any = None  # what it has returned
    calls: dict[Key, Call] = field(default_factory=dict)  # of metrics and `self.log`, in order
    statistics: Sequence[Tensor] = ()  # that BatchNorm layers have tracked
    changes: Mapping[int, Changes] = field(default_factory=dict)  # of attributes and containers
    edits: Mapping[str, Any] = field(default_factory=dict)  # of weights and buffers, by path


class Recorder:
    """Writes down what replicas log and give to metrics, and replays it once for all of them."""

    def __init__(self, replicas: Replicas, lockstep: Lockstep) -> None:
        self.replicas, self.lockstep = replicas, lockstep
        self._blanks: dict[int, tuple[Any, Any]] = {}  # by id: a metric, and a copy without samples
        self._forget()

    def _forget(self) -> None:
        self.is_recording = False
        self.records: Mapping[int, Record] = {}
        self._counts: dict[Any, int] = defaultdict(int)
        # `self.log("f1", self.f1(Z, y))`: by the id of a tensor that `forward` has returned
        self._sources: dict[int, tuple[Key, Path, Tensor]] = {}
        self._values: dict[Key, Any] = {}  # what calls return for the whole batch
        self.metrics: list[Any] = []  # in the module's order
        self._numbers: dict[int, int] = {}  # theirs, by id
        self._names: list[str] = []

    @contextmanager
    def recording(self, records: Mapping[int, Record]) -> Iterator[None]:
        """Inside the block calls are written down, to be made by `combine_calls`."""
        model = self.replicas.module
        results: Any = model.trainer._results  # private: where `self.log` puts values, if anywhere
        patches: list[tuple[Any, str, Any]] = [(model, TO_TENSOR, self._to_tensor)]
        for name, module in self.replicas.modules():
            for metric in module.modules():
                if isinstance(metric, METRICS) and id(metric) not in self._numbers:
                    self._numbers[id(metric)] = len(self.metrics)
                    self.metrics.append(metric)
                    self._names.append(name)
                    if id(metric) not in self._blanks:
                        self._blanks[id(metric)] = metric, _blank_copy(metric)
                    patches += [(metric, each, self._recorded(metric, each)) for each in METHODS]
        if results is not None:
            self._log = results.log
            patches.append((results, "log", self._record_log))
        self.records, self.is_recording = records, True
        try:
            with replace_attributes(patches):
                yield
        finally:
            self._forget()

    # While replicas run

    def _write(self, caller: Any, name: str, call: Call) -> Key:
        i = self.replicas.first + self.replicas.current
        key = Key(caller, name, self._counts[i, caller, name])
        self._counts[i, caller, name] += 1
        self.records[i].calls[key] = call
        return key

    def _record_log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        self._write(fx, name, Call(None, "log", (value, self._sources.get(id(value))), kwargs))

    def _to_tensor(self, value: Any, name: str) -> Any:
        if self.is_recording and not isinstance(value, Tensor):
            return value  # a number: it is copied to the device once for the whole batch
        made: Tensor = getattr(LightningModule, TO_TENSOR)(self.replicas.module, value, name)
        if (source := self._sources.get(id(value))) is not None:
            self._sources[id(made)] = *source[:2], made
        return made

    def _recorded(self, metric: Any, method: str) -> Callable[..., Any]:
        """The replacement of a metric's method."""
        itself = getattr(metric, method)

        def record(*args: Any, **kwargs: Any) -> Any:
            if not self.is_recording:
                return itself(*args, **kwargs)
            if method == "compute":
                return self._compute(metric)
            given, named = apply_to_collection((args, kwargs), Tensor, lambda t: t.detach().clone())
            tensors = [each for each in leaves([*args, kwargs]) if isinstance(each, Tensor)]
            has_weights = any(map(self.replicas.holds, tensors))
            call = Call(metric, method, given, named, has_weights)
            key = self._write(self._numbers[id(metric)], method, call)
            return self._for_the_shard(metric, key, args, kwargs) if method == "forward" else None

        return record

    def _for_the_shard(self, metric: Any, key: Key, args: Any, kwargs: Any) -> Any:
        """The value that `forward` returns to a replica. NaN if its shard has too few samples."""
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
        """A copy without samples, on the replica's device, or on the CPU where the user has it."""
        blank = self._blanks[id(metric)][1]
        blank.reset()
        types = {part.device.type for part in metric.modules() if isinstance(part, Metric)}
        is_home = self.replicas.devices[0].type in types
        return blank.to(self.replicas.module.device) if is_home else blank

    def _compute(self, metric: Any) -> Any:
        """Replicas meet for it: all of them must have updated the metric."""
        if self.lockstep.running is None:
            raise RuntimeError(
                f"{type(metric).__name__}.compute() in a step needs what all replicas have seen: "
                "set lockstep=True (--trainer.strategy.lockstep=true), or compute it when the "
                "epoch ends."
            )

        def compute(records: Mapping[int, Record]) -> Any:
            self.combine_calls(records)
            with self._doing():
                return metric.compute()

        where = "compute()", self._numbers[id(metric)]
        record = self.records[self.lockstep.running.index]
        value = self.lockstep.meet(where, record, compute)
        device = self.replicas.module.device
        return apply_to_collection(value, Tensor, lambda t: t.to(device, copy=True))

    # Afterwards

    @contextmanager
    def _doing(self) -> Iterator[None]:
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = True

    def combine_calls(self, records: Mapping[int, Record]) -> None:
        """Make the calls of all records, each once.

        Metrics go first: their values are needed by the calls of `self.log`.
        """
        notes = self.replicas.notes
        keys = dict.fromkeys(key for record in records.values() for key in record.calls)
        with self._doing():
            for key in sorted(keys, key=lambda key: isinstance(key.caller, str)):
                by_replica = {i: r.calls[key] for i, r in records.items() if key in r.calls}
                calls, sizes = list(by_replica.values()), [records[i].size for i in by_replica]
                is_log = calls[0].method == "log"
                if len(calls) < len(records) and not calls[0].kwargs.get("rank_zero_only"):
                    name = key.name if is_log else f"{self._names[key.caller]}.{key.name}()"
                    notes.warn(
                        f"{name} was called by {len(calls)} of {len(records)} replicas: it has not "
                        "seen the samples of the others. A step must not decide by its shard."
                    )
                if is_log:
                    self._log_once(key.caller, key.name, calls, sizes)
                else:
                    devices = self.lockstep.devices
                    self._values[key] = call_once(calls, sizes, devices, self._blank)
        for record in records.values():
            record.calls.clear()

    def _log_once(self, fx: str, name: str, calls: list[Call], sizes: list[int]) -> None:
        """`batch_size` counts samples of the shard: the whole batch has the sum."""
        (value, source), kwargs = calls[0].args, calls[0].kwargs
        home = self.replicas.devices[0]
        if kwargs.get("batch_size") is not None:
            given = [call.kwargs["batch_size"] for call in calls]
            kwargs = {**kwargs, "batch_size": sum(given)}
            sizes = given if len({*given}) > 1 else sizes
        if source is not None:
            key, path, _ = source
            value = reduce(getitem, path, self._values[key])
        elif isinstance(value, (Tensor, Number)):
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # as Lightning
            values = [call.args[0] for call in calls]
            if all(isinstance(value, Tensor) for value in values):
                values = [value.to(home) for value in values]
            else:
                values = [torch.as_tensor(value, dtype=dtype, device="cpu") for value in values]
            value = reduce_logged(values, sizes, kwargs.get("reduce_fx", "mean")).to(home)
        self._log(fx, name, value, **kwargs)


def _paths(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a metric's answer, and the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(part, (*path, key))


def _blank_copy(metric: Any) -> Any:
    states = [leaf for part in metric.modules() for leaf in leaves(dict(vars(part)))]
    memo = {id(each): each.detach().clone() for each in states if isinstance(each, Tensor)}
    blank = copy.deepcopy(metric, memo)  # without a graph, which cannot be copied
    if isinstance(blank, MetricCollection):
        # private: two may be equal for a shard, but not for the batch
        blank._enable_compute_groups = False
    return blank
