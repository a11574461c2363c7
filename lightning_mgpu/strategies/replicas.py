"""One module, k sets of parameters: `with replicas.enter(i)` puts set i into it, as in the book's
`lenet(X, params)`.

A module keeps everything it has, its parameters and buffers too, in its `__dict__`. So a replica is
a list of such dicts, one per layer, with tensors of its own in them. `enter` exchanges the dicts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # the latter: all with statistics
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_mgpu.allreduce.messages import copy_all
from lightning_mgpu.strategies.devices_and_attributes import current_device, data_of
from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.merging import Merger
from lightning_mgpu.strategies.state import State
from lightning_mgpu.strategies.streams import Streams

# one for all replicas, states included
SHARED = (Metric, MetricCollection, MetricTracker, torch.jit.ScriptModule)
TRACKED = ("running_mean", "running_var", "num_batches_tracked")
TensorSet = tuple[Tensor, ...]  # a parameter or a buffer, one per replica; the first is the user's


class TensorPlace(NamedTuple):
    """A parameter or a buffer, and where it is."""

    tensor: Tensor
    layer: nn.Module
    name: str  # in the layer
    path: str  # in the module


def get_params(params: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A replica's own parameters, as in the book: copies on its device. Buffers, too."""
    new_params: list[Tensor] = []
    for param in params:
        with torch.inference_mode(False), torch.no_grad():
            new = param.detach().to(device, copy=True)
        if isinstance(param, nn.Parameter):
            new = nn.Parameter(new, param.requires_grad)
            if type(param) is not nn.Parameter:  # a class of one's own, for example with a manifold
                new.__class__ = type(param)
                vars(new).update(vars(param))
        new_params.append(new)
    return new_params


class Replicas:
    """The replicas of this process. The first one's tensors are those of the user's module.

    `first` is its number among the replicas of all processes. In the package `i` counts all of
    them, except in the methods of replicas.py, state.py, updates.py and streams.py.
    """

    def __init__(
        self,
        module: LightningModule,
        devices: Sequence[torch.device],
        all_seeded: bool,
        first: int = 0,
    ) -> None:
        self.module, self.devices, self.first = module, list(devices), first
        self.streams, self.notes = Streams(devices, first, all_seeded), Notes()
        self.state = State(devices, self._localize, first)
        self.merger = Merger(self.state, self.notes)
        self.numbers = range(first, first + len(devices))
        self.current = 0  # whose turn it is
        self._inside: list[Any] = []  # the namespaces and containers that the module has
        self.unknown_code: set[str] = set()  # names of what may edit weights unseen in every step
        self.parameter_sets: dict[str, TensorSet] = {}
        self.buffer_sets: dict[str, TensorSet] = {}
        self.set_of: dict[int, TensorSet] = {}  # of parameters and buffers, by the original's id
        self._place_of: dict[int, TensorPlace] = {}  # by the original's id
        self._structure_at_find: list[Any] = []  # by `find`, the last time
        self._named: list[tuple[str, nn.Module]] = []  # layers and metrics
        self._layers: list[nn.Module] = []  # the same
        self._tensors: list[Tensor | None] = []  # of all layers, in order
        self._marks: list[tuple[int, int]] = []  # of all parameters when the replicas were equal
        self._buffer_marks: list[tuple[int, int]] = []  # when the step began
        self.is_distrusted = True  # weights may have been edited in a way that torch does not count
        self.data_was_read = False  # of a weight or buffer by a step, which may have edited it

    # Weights

    def distrust(self) -> None:
        """Note that the first replica's weights may have been edited unseen."""
        self.is_distrusted = True

    def mark_equal(self) -> None:
        """Note that the replicas are equal now."""
        self._marks, self.is_distrusted = _marks(self.parameter_sets.values()), False

    @property
    def are_as_marked(self) -> bool:
        """Whether replicas were equal and, as far as torch knows, none was edited since."""
        return not self.is_distrusted and self._marks == _marks(self.parameter_sets.values())

    def push_weights(self, is_sure: bool = True) -> None:
        """Copy the first replica's parameters to the others, unless they are equal.

        Unknown code counts as an edit, unless the caller `is_sure` that none has run.
        """
        if (self.unknown_code and not is_sure) or not self.are_as_marked:
            copy_tensors(self.parameter_sets.values())
            self.mark_equal()

    # A step

    def find(self, shared: Sequence[Any], others: Sequence[Any]) -> None:
        """Find the layers, tensors and Python objects of the module, unless they are the same.

        Args:
            shared: Objects that stay one for all replicas.
            others: Objects besides the module that replicas have a state of.
        """
        structure = self._structure(shared, others)
        if self.state.is_as_found() and _are_same(structure, self._structure_at_find):
            return
        self._named = _walk(self.module)
        self._find_state(shared, others)
        while more := _unknown(self.state.modules, self._named):  # a teacher in a list, for example
            self._named += more
            self._find_state(shared, others)
        layers = [layer for _, layer in self._named]
        tensors = [tensor for layer in layers for tensor in _tensors(layer)]
        if not (_are_same(layers, self._layers) and _are_same(tensors, self._tensors)):
            self._layers, self._tensors = layers, tensors
            parameters, buffers = _find(self._named, "_parameters"), _find(self._named, "_buffers")
            self._place_of = parameters | buffers
            new = [each.tensor for key, each in self._place_of.items() if key not in self.set_of]
            sets = zip(*[new, *(get_params(new, device) for device in self.devices[1:])])
            set_of = {**self.set_of, **{id(tensors[0]): tensors for tensors in sets}}
            self.set_of = {key: set_of[key] for key in self._place_of}
            self.parameter_sets = {each.path: set_of[key] for key, each in parameters.items()}
            self.buffer_sets = {each.path: set_of[key] for key, each in buffers.items()}
        self._structure_at_find = self._structure(shared, others)

    def _structure(self, shared: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """What `find` looks at, in order."""
        seen = [*shared, None, *others]
        for layer in self._layers:
            if not isinstance(layer, SHARED):
                for held in (layer._modules, layer._parameters, layer._buffers):
                    seen += held
                    seen += held.values()
        return seen

    def _find_state(self, shared: Sequence[Any], others: Sequence[Any]) -> None:
        layers = [layer for _, layer in self._named if not isinstance(layer, SHARED)]
        self.state.find(layers, shared, others)

    def begin(self, step: int, *numbers: int, meets: bool) -> None:
        """A step begins, after `find`: give the replicas what the first has.

        `step` says which, the numbers which epoch and batch, and `meets` whether replicas may meet.
        """
        self.streams.begin(step, *numbers, meets=meets)
        for original, *others in self.parameter_sets.values():
            for other in others:
                if attributes := vars(original):  # `weight.decay = 0.1`, which a step may read
                    vars(other).update(attributes)
                if other.requires_grad != original.requires_grad:
                    other.requires_grad_(original.requires_grad)
        self.push_weights(is_sure=False)
        copy_tensors(self.buffer_sets.values())
        self._buffer_marks, self.data_was_read = _marks(self.buffer_sets.values()), False
        self.state.begin(step, meets)
        self._inside = self.state.home

    def _localize(self, namespace: dict[str, Any], i: int) -> None:
        """Put replica i's tensors into the copy of a layer's `__dict__`."""
        for name in ("_parameters", "_buffers"):
            if namespace.get(name):
                tensors = namespace[name].items()
                namespace[name] = {key: self.tensor_of(each, i) for key, each in tensors}
        if "_flat_weights" in namespace:  # what recurrent layers compute with
            weights = namespace["_flat_weights"]
            namespace["_flat_weights"] = [self.tensor_of(weight, i) for weight in weights]
        if "_device" in namespace:  # a LightningModule's
            namespace["_device"] = self.devices[i]

    def tensor_of(self, tensor: Any, i: int) -> Any:
        """Replica i's of a parameter or buffer; anything else is what it is."""
        tensors = self.set_of.get(id(tensor))
        return tensor if tensors is None else tensors[i]

    @contextmanager
    def enter(self, i: int) -> Iterator[None]:
        """Let the module be replica i inside the block, in a step and in its backward pass."""
        self.current = i
        self._put_in(self.state.stores[i])
        try:
            with current_device(self.devices[i]), self.streams.of(i):
                yield
        finally:
            self.current = 0
            self._put_in(self.state.home)

    @property
    def is_away(self) -> bool:
        """Whether it is the turn of a replica other than replica 0."""
        return self._inside is not self.state.home

    def _put_in(self, stores: list[Any]) -> None:
        if stores is not self._inside:
            self._inside = stores
            for owner, namespace in zip(self.state.owners, stores):
                object.__setattr__(owner, "__dict__", namespace)

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Metrics, and modules in containers and objects, which may hold metrics, with names."""
        return [each for each in self._named if isinstance(each[1], SHARED)] + self.state.modules

    def statistics(self, i: int) -> list[Tensor]:
        """What BatchNorm layers have tracked in replica i, and how often."""
        return [
            self.set_of[key][i]
            for key, each in self._place_of.items()
            if isinstance(each.layer, _NormBase) and each.layer.training and each.name in TRACKED
        ]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a replica's parameter or buffer."""
        sets = self.buffer_sets.values()
        return isinstance(tensor, nn.Parameter) or any(tensor is b for each in sets for b in each)

    def edits(self, active: Sequence[int]) -> list[dict[str, Any]]:
        """By replica of the step: the weights and buffers that the step may have edited."""
        parameters, buffers = self.parameter_sets, self.buffer_sets
        edits: dict[str, dict[int, Any]] = {}  # by path and replica
        are_edited = self._are_edited(self._marks, _marks(parameters.values()))
        for (path, tensors), is_edited in zip(parameters.items(), are_edited):
            if is_edited:
                edits[path] = {i: tensors[i] for i in active}
        number = {id(owner): n for n, owner in enumerate(self.state.owners)} if buffers else {}
        are_edited = self._are_edited(self._buffer_marks, _marks(buffers.values()))
        for (path, tensors), is_edited in zip(buffers.items(), are_edited):
            layer, name = self._place_of[id(tensors[0])][1:3]
            if not isinstance(layer, _NormBase):  # whose statistics are averaged
                namespaces = {i: self.state.stores[i][number[id(layer)]] for i in active}
                held = {i: namespace["_buffers"].get(name) for i, namespace in namespaces.items()}
                if is_edited or any(tensors[i] is not other for i, other in held.items()):
                    edits[path] = held
        return [{path: held[i] for path, held in edits.items()} for i in active]

    def compare_edited(self, edits: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn of weights and buffers to which the step has given different values by shard.

        All replicas get replica 0's values from now on.
        """
        for path in dict.fromkeys(path for each in edits.values() for path in each):
            original = (self.parameter_sets.get(path) or self.buffer_sets[path])[0]
            held = {i: each[path] for i, each in edits.items() if path in each}
            self._note_edit(original, [*held.values()])
            if self.first and 0 not in held:
                raise RuntimeError(
                    f"A step edits {path} by what is in its shard, and only in some processes: "
                    "edit it in a hook, for example `on_train_batch_start`."
                )
            if self.first:
                self._assign(original, held[0])

    @torch.no_grad()
    def _assign(self, original: Tensor, value: Tensor | None) -> None:
        """Give a weight or a buffer the value that replica 0 has in its process."""
        if value is None:
            place = self._place_of[id(original)]
            place.layer._buffers[place.name] = None
        elif (value.shape, value.dtype) == (original.shape, original.dtype):
            data_of(original).copy_(value)
        else:
            original.data = value.detach()

    def _are_edited(self, before: list[Any], now: list[Any]) -> Iterable[bool]:
        """Whether tensors may have been edited, for each set."""
        k = len(self.devices)
        if self.data_was_read or before == now:
            return repeat(self.data_was_read)
        return [before[n : n + k] != now[n : n + k] for n in range(0, len(now), k)]

    def _note_edit(self, original: Tensor, held: list[Any]) -> None:
        """Warn if the tensors that the replicas hold after an edit differ."""
        self.distrust()
        _, layer, name, _ = self._place_of[id(original)]
        message = (
            f"A step edits {name} of {type(layer).__name__} by what is in its shard. The first "
            "replica's value is kept for all: edit it in a hook, for example "
            "`on_train_batch_start`."
        )
        if len({t if t is None else (t.shape, t.dtype, t.layout) for t in held}) > 1:
            self.notes.warn(message)
        elif held[0] is not None and held[0].layout == torch.strided:
            self.notes.compare(message, held)

    def release(self) -> None:
        """Let go of all tensors. Cycles would hold them until Python's collector runs."""
        self.streams.begin()
        self.state.clear()
        del self._named[:], self._layers[:], self._tensors[:], self._marks[:], self._buffer_marks[:]
        del self._structure_at_find[:]
        for held in (self.parameter_sets, self.buffer_sets, self.set_of, self._place_of):
            held.clear()
        self.state.hidden_states.clear()


def _walk(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """All layers with their names, each once, without those inside metrics or scripted layers."""
    layers: dict[int, tuple[str, nn.Module]] = {}  # by id: metrics are equal where states are

    def walk(layer: nn.Module, name: str) -> None:
        if id(layer) not in layers:
            layers[id(layer)] = name, layer
            for key, child in layer._modules.items() if not isinstance(layer, SHARED) else ():
                if child is not None:
                    walk(child, f"{name}.{key}" if name else key)

    walk(module, prefix)
    return list(layers.values())


def _unknown(
    modules: Sequence[tuple[str, nn.Module]], named: Sequence[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module]]:
    """Layers of modules that are not yet among the named ones, without metrics."""
    named_ids = {id(layer) for _, layer in named}
    walked = [each for name, m in modules if not isinstance(m, SHARED) for each in _walk(m, name)]
    unique = {id(layer): (name, layer) for name, layer in walked if id(layer) not in named_ids}
    return list(unique.values())


def _tensors(layer: nn.Module) -> list[Tensor | None]:
    if isinstance(layer, SHARED):
        return []
    return [*layer._parameters.values(), *layer._buffers.values()]


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


def _find(named: list[tuple[str, nn.Module]], where: str) -> dict[int, TensorPlace]:
    """All parameters, or all buffers, by their ids."""
    places: dict[int, TensorPlace] = {}
    for prefix, layer in named:
        for name, tensor in vars(layer)[where].items() if not isinstance(layer, SHARED) else ():
            if tensor is not None:
                path = f"{prefix}.{name}".lstrip(".")
                places.setdefault(id(tensor), TensorPlace(tensor, layer, name, path))
    return places


@torch.no_grad()
def copy_tensors(sets: Iterable[TensorSet]) -> None:
    """Give the first tensor's values to the others of its set."""
    columns = list(zip(*sets))  # one per replica
    for others in columns[1:]:
        for first, other in zip(columns[0], others):
            if (other.shape, other.dtype) != (first.shape, first.dtype):  # `.data` was set
                other.data = torch.empty_like(first, device=other.device)
        # by `.data`: a hook may have edited weights before the backward pass, which checks versions
        copy_all([data_of(other) for other in others], columns[0])


def _marks(sets: Iterable[TensorSet]) -> list[tuple[int, int]]:
    """Numbers that change with an edit: torch counts edits in place; `.data = ` moves a tensor."""
    tensors = [tensor for tensors in sets for tensor in tensors]
    try:
        return list(zip(map(attrgetter("_version"), tensors), map(Tensor.data_ptr, tensors)))
    except RuntimeError:  # of tensors made under inference, or sparse
        versions = [0 if t.is_inference() else t._version for t in tensors]
        places = [t.data_ptr() if t.layout == torch.strided else 0 for t in tensors]
        return list(zip(versions, places))


def check_layers(module: nn.Module, sync_batchnorm: bool) -> None:
    """Refuse layers that replicas would train wrongly, in one line with the fix."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise MisconfigurationException(
                f"{name}: {type(layer).__name__}(max_norm=...) edits its weights in `forward`: "
                "each replica would edit others. Use one device, or shorten the rows in "
                "`on_train_batch_start`."
            )
        is_compiled = isinstance(layer, torch._dynamo.OptimizedModule) or layer._compiled_call_impl
        has_norm = any(isinstance(part, _BatchNorm) for part in layer.modules())
        if sync_batchnorm and is_compiled and has_norm:  # its graph does not call `F.batch_norm`
            raise MisconfigurationException(
                "sync_batchnorm=True does not reach BatchNorm in compiled layers: leave one of the "
                "two out."
            )
