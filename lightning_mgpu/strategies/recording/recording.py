"""What replicas log in a step, reduced once: values and torchmetrics equal those of one device with the whole batch.

While replicas run, `self.log` and the calls of torchmetrics objects are written down instead of done. Afterwards they
are done once, on the original module: logged values joined with the shard sizes as weights, metrics updated with the
shards' arguments put together. Equal by construction, for any metric, also one whose states cannot be merged.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker, Running

from lightning_mgpu.strategies.batch.nesting import leaves
from lightning_mgpu.strategies.recording.batch_sizes import BatchSizes
from lightning_mgpu.strategies.recording.log_calls import LOG, instead_of_log, intercepted
from lightning_mgpu.strategies.replicas.attributes import BUILT_IN, HOOKS
from lightning_mgpu.strategies.replicas.get_params import SHARED, copy_with_care
from lightning_mgpu.strategies.replicas.values import CONTAINERS, MAX_ITEMS

METHODS = ("forward", "update", "compute", "reset")
LOG_SIGNATURE = inspect.signature(LOG)

Call = tuple[str, str, int]
"""A call of a metric in a step: the metric's name, the method's, and how many such calls came before."""


@dataclass
class Record:
    """What one replica did in a step: values logged, and calls of metrics, each in order."""

    logged: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)
    calls: dict[Call, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)
    returned: dict[int, tuple[Call, Any, Any]] = field(default_factory=dict)  # by id: call, key in a dict, the value


def find_metrics(module: LightningModule) -> dict[str, Any]:
    """Metrics, collections and trackers by name, also those inside one another, in plain lists, dicts and objects."""
    # some metrics are equal to others, ROUGEScores say, and would be left out as duplicates
    found: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    for name, owner in list(found.items()):
        for attribute, value in vars(owner).items():
            if attribute not in BUILT_IN and not (isinstance(owner, Metric) and attribute.startswith("_")):
                found.update({f"{name}.{attribute}.{n}": item for n, item in enumerate(_inside(value))})
    names = {
        id(item): name for name, item in found.items() if isinstance(item, (Metric, MetricCollection, MetricTracker))
    }
    return {name: found[name] for name in names.values()}


def _inside(value: Any) -> Iterator[Any]:
    """What is in a value, and in objects in it, in an order that is the same for its copy."""
    todo, visited = [value], set()
    while todo:
        for item in leaves(todo.pop()):
            yield item
            if id(item) not in visited and not isinstance(item, (*SHARED, Trainer, Tensor, nn.Module, type)):
                visited.add(id(item))
                parts = getattr(item, "__dict__", {}).values()
                todo.extend(part for part in parts if not isinstance(part, CONTAINERS) or len(part) <= MAX_ITEMS)


class Recorder:
    """Records one replica, `module`; the metrics in it are not touched.

    What a metric returns in the middle of a step is its value for the shard in this step, computed on a copy. Where it
    is logged, the value for the whole batch is.
    """

    def __init__(
        self, module: LightningModule, metrics: dict[str, Any], original: LightningModule | None = None
    ) -> None:
        self.module, self.original = module, original or module
        self.originals = find_metrics(self.original)
        self.record = Record()
        self.metrics = metrics
        self.batch_sizes = BatchSizes()
        self.names = {id(metric): name for name, metric in self.metrics.items()}
        self._copies: dict[str, Any] = {}
        self._saved: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Write down instead of do."""
        self.record = Record()
        self._patch()
        try:
            with instead_of_log(self._log, self.module):
                yield
        finally:
            self._restore()

    @contextlib.contextmanager
    def alone(self, size: int) -> Iterator[None]:
        """Do instead of write down: this replica has the whole batch, of `size` samples."""
        if not self.batch_sizes:
            yield
            return

        def log(*args: Any, **kwargs: Any) -> None:
            given = LOG_SIGNATURE.bind(self.module, *args, **kwargs).arguments
            if given.get("batch_size") is not None:
                given["batch_size"] = self.batch_sizes.of_batch(given["name"], [given["batch_size"]], [size])[1]
            LOG(**given)

        with intercepted([self.module]), instead_of_log(log, self.module):
            yield

    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        """Do what was written down; what a `log` of the user's own adds to it, it has added."""
        LOG(self.module, name, value, **kwargs)

    def take(self) -> Record:
        """What was recorded, which is forgotten here: it holds tensors of the step."""
        record, self.record = self.record, Record()
        return record

    def _patch(self) -> None:
        for name, metric in self.metrics.items():  # a Metric keeps its wrapped update as an attribute of its own
            self._saved[name] = {method: vars(metric)[method] for method in METHODS if method in vars(metric)}
            vars(metric).update({method: partial(self._call, name, method) for method in METHODS})

    def _restore(self) -> None:
        for name, metric in self.metrics.items():
            for method in METHODS:
                del vars(metric)[method]
            vars(metric).update(self._saved[name])

    def _log(self, *args: Any, **kwargs: Any) -> None:
        if self.module.trainer._results is None:  # in a step that cannot log: Lightning says so
            LOG(self.module, *args, **kwargs)
        given = LOG_SIGNATURE.bind(self.module, *args, **kwargs).arguments
        del given["self"]
        name, value = given.pop("name"), given.pop("value")
        if isinstance(value, Metric) and id(value) in self.names:
            value = Logged(self.names[id(value)])
        elif id(value) in self.record.returned:
            value = Returned(*self.record.returned[id(value)][:2])
        self.record.logged.append((name, _as_is_now(value), given))

    def _call(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        calls = self.record.calls
        call = (name, method, sum(other[:2] == (name, method) for other in calls))
        before = [
            arguments for other, arguments in calls.items() if other[0] == name and other[1] in ("update", "forward")
        ]
        calls[call] = _as_is_now((args, kwargs))
        if method == "forward":
            value = self._on_a_copy(name, [(args, kwargs)], forward=True)  # with its graph: it may be the loss
        elif method == "compute":
            value = self._on_a_copy(name, before)
        else:
            return None
        parts = value if isinstance(value, dict) else {None: value}
        self.record.returned |= {id(part): (call, key, part) for key, part in parts.items() if isinstance(part, Tensor)}
        return value

    def _on_a_copy(self, name: str, updates: list[tuple[tuple, dict[str, Any]]], forward: bool = False) -> Any:
        if name not in self._copies:
            self._restore()  # a copy that records would be no use
            try:
                self._copies[name] = copy_metric(inner_metric(self.metrics[name]))
            finally:
                self._patch()
        copied = self._copies[name]
        self._move(copied, name)
        copied.reset()
        compute = copied.compute
        if forward and type(copied).forward not in (Metric.forward, MetricCollection.forward):
            args, kwargs = updates[0]
            compute = partial(copied, *args, **kwargs)
        else:
            for part in copied.modules():
                if isinstance(part, Metric):
                    part._enable_grad = forward  # as in Metric.forward
            for args, kwargs in updates:
                copied.update(*args, **kwargs)
        with contextlib.suppress(Exception):  # too few samples in the shard, but not in the batch
            if updates:
                return compute()
        nan = torch.tensor(torch.nan)
        return {str(key): nan.clone() for key in copied} if isinstance(copied, MetricCollection) else nan

    def _move(self, copied: nn.Module, name: str) -> None:
        """Put a copy, and metrics in lists of its own, on the replica's device; on the CPU if the user has it there."""
        home = self.original.device
        if home.type == self.module.device.type == "cpu":
            return
        place = _device_of(self.originals[name])
        own = place if place.type == "cpu" and home.type != "cpu" else self.module.device
        for part in (copied, *(part for value in vars(copied).values() for part in _inside(value))):
            if isinstance(part, nn.Module) and _device_of(part) != own:
                part.to(own)


def record_replicas(modules: Sequence[LightningModule]) -> list[Recorder]:
    """A recorder for each; a metric in something that all replicas share, as it could not be copied, is left alone."""
    found = [find_metrics(module) for module in modules]
    num_owners = Counter(id(metric) for metrics in found for metric in metrics.values())
    return [
        Recorder(module, {name: metric for name, metric in metrics.items() if num_owners[id(metric)] == 1}, modules[0])
        for module, metrics in zip(modules, found)
    ]


@dataclass
class Logged:
    """Stands for a metric object that was logged, by its name in the module."""

    name: str


@dataclass
class Returned:
    """Stands for what a call of a metric returned, or what was at `key` in it."""

    call: Call
    key: Any


def _device_of(metric: nn.Module) -> torch.device:
    devices = (part.device for part in metric.modules() if isinstance(part, Metric))
    return next(devices, torch.device("cpu"))


def inner_metric(metric: Any) -> Any:
    """The metric that gets the arguments, inside one that keeps its history."""
    if isinstance(metric, MetricTracker):
        return inner_metric(metric._base_metric)
    return metric.base_metric if isinstance(metric, Running) else metric


def copy_metric(metric: nn.Module) -> Any:
    """A copy without its hooks, which may lead anywhere; what cannot be copied, a lock say, it shares.

    A `reset` that somebody has set on it, and that calls the original's, is left out: the copy's is its class's.
    """
    hooks = [vars(part)[name] for part in metric.modules() for name in HOOKS if name in vars(part)]
    memo: dict[int, Any] = {id(own): type(own)() for own in hooks}
    copied = copy_with_care(metric, memo)
    for part in copied.modules():
        vars(part).pop("reset", None)
    return copied


def _as_is_now(value: Any) -> Any:
    """Without graph, and safe from changes in place later in the step."""
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().clone())
