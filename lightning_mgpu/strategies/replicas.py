"""One module, k sets of parameters: `with replicas.enter(i)` puts set i into it, as in the book's
`lenet(X, params)`.

A module keeps everything it has, its parameters and buffers too, in its `__dict__`. So a replica is
a list of such dicts, one per layer, with tensors of its own in them. `enter` exchanges the dicts.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # all layers that track statistics

from lightning_mgpu.allreduce.messages import copy_all
from lightning_mgpu.strategies.devices_and_attributes import current_device, data_of
from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.layers import (
    SHARED,
    NamedLayer,
    TensorPlace,
    are_same,
    find_layers,
    find_places,
)
from lightning_mgpu.strategies.merging import Merger
from lightning_mgpu.strategies.state import State
from lightning_mgpu.strategies.streams import Streams

TRACKED = ("running_mean", "running_var", "num_batches_tracked")
TensorSet = tuple[Tensor, ...]  # a parameter or a buffer, one per replica; the first is the user's
Marks = list[tuple[int, int]]  # see `marks`


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
        self.place_of: dict[int, TensorPlace] = {}  # by the original's id
        self._structure_at_find: list[Any] = []  # by `find`, the last time
        self._named: list[NamedLayer] = []  # layers and metrics
        self.equal_marks: Marks = []  # of all parameters when the replicas were equal
        self.is_distrusted = True  # weights may have been edited in a way that torch does not count

    # Weights

    def distrust(self) -> None:
        """Note that the first replica's weights may have been edited unseen."""
        self.is_distrusted = True

    def mark_equal(self) -> None:
        """Note that the replicas are equal now."""
        self.equal_marks, self.is_distrusted = marks(self.parameter_sets.values()), False

    @property
    def are_as_marked(self) -> bool:
        """Whether replicas were equal and, as far as torch knows, none was edited since."""
        return not self.is_distrusted and self.equal_marks == marks(self.parameter_sets.values())

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
        if self.state.is_as_found() and are_same(structure, self._structure_at_find):
            return
        self._named, more = [], find_layers([("", self.module)])
        while more:  # for example a teacher in a list
            self._named += more
            layers = [layer for _, layer in self._named if not isinstance(layer, SHARED)]
            self.state.find(layers, shared, others)
            more = find_layers(self.state.modules, self._named)
        parameters = find_places(self._named, "_parameters")
        buffers = find_places(self._named, "_buffers")
        self.place_of = parameters | buffers
        new = [each.tensor for key, each in self.place_of.items() if key not in self.set_of]
        sets = zip(*[new, *(get_params(new, device) for device in self.devices[1:])])
        set_of = {**self.set_of, **{id(tensors[0]): tensors for tensors in sets}}
        self.set_of = {key: set_of[key] for key in self.place_of}
        self.parameter_sets = {each.path: set_of[key] for key, each in parameters.items()}
        self.buffer_sets = {each.path: set_of[key] for key, each in buffers.items()}
        self._structure_at_find = self._structure(shared, others)

    def _structure(self, shared: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """What `find` looks at, in order."""
        seen = [*shared, None, *others]
        for _, layer in self._named:
            if not isinstance(layer, SHARED):
                for held in (layer._modules, layer._parameters, layer._buffers):
                    seen += held
                    seen += held.values()
        return seen

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
        self.state.begin(step, meets)
        self._inside = self.state.home

    def _localize(self, namespace: dict[str, Any], i: int) -> None:
        """Put replica i's tensors into the copy of a layer's `__dict__`."""
        for name in ("_parameters", "_buffers"):
            if namespace.get(name):
                tensors = namespace[name].items()
                namespace[name] = {key: self.tensor_of(each, i) for key, each in tensors}
        if "_flat_weights" in namespace:  # what recurrent layers compute with
            weights = [self.tensor_of(weight, i) for weight in namespace["_flat_weights"]]
            namespace["_flat_weights"] = weights
            namespace["_flat_weight_refs"] = [w if w is None else weakref.ref(w) for w in weights]
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

    def modules(self) -> list[NamedLayer]:
        """Metrics, and modules in containers and objects, which may hold metrics, with names."""
        return [each for each in self._named if isinstance(each[1], SHARED)] + self.state.modules

    def statistics(self, i: int) -> list[Tensor]:
        """What BatchNorm layers have tracked in replica i, and how often."""
        return [
            self.set_of[key][i]
            for key, each in self.place_of.items()
            if isinstance(each.layer, _NormBase) and each.layer.training and each.name in TRACKED
        ]

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a replica's parameter or buffer."""
        sets = self.buffer_sets.values()
        return isinstance(tensor, nn.Parameter) or any(tensor is b for each in sets for b in each)

    def release(self) -> None:
        """Let go of all tensors. Cycles would hold them until Python's collector runs."""
        vars(self).clear()


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


def marks(sets: Iterable[TensorSet]) -> Marks:
    """Numbers that change with an edit: torch counts edits in place; `.data = ` moves a tensor."""
    tensors = [tensor for tensors in sets for tensor in tensors]
    try:
        return list(zip(map(attrgetter("_version"), tensors), map(Tensor.data_ptr, tensors)))
    except RuntimeError:  # of tensors made under inference, or sparse
        versions = [0 if t.is_inference() else t._version for t in tensors]
        places = [t.data_ptr() if t.layout == torch.strided else 0 for t in tensors]
        return list(zip(versions, places))
