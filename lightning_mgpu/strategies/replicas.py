"""One module, k sets of parameters: `with replicas.turn(i)` puts set i into it, as in the book's
`lenet(X, params)`.

A module keeps everything it has, its parameters and buffers too, in its `__dict__`. So a replica is
a list of such dicts, one per layer, with tensors of its own in them. A turn exchanges the dicts.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # the latter: all with statistics
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_mgpu.allreduce.messages import copy_all
from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.one_process import current_device
from lightning_mgpu.strategies.reads import data_of
from lightning_mgpu.strategies.state import State
from lightning_mgpu.strategies.streams import Streams

# one for all replicas, states included
SHARED = (Metric, MetricCollection, MetricTracker, torch.jit.ScriptModule)
TensorSet = tuple[Tensor, ...]  # a parameter or a buffer, one per replica; the first is the user's


class Found(NamedTuple):
    """A parameter or a buffer, and where it is."""

    tensor: Tensor
    layer: nn.Module
    name: str  # in the layer
    prefix: str  # of the layer


def get_params(params: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A replica's own parameters, as in the book: copies on its device. Buffers, too."""
    with torch.inference_mode(False), torch.no_grad():
        copies = [(param, param.detach().to(device, copy=True)) for param in params]
    return [
        nn.Parameter(own, param.requires_grad) if isinstance(param, nn.Parameter) else own
        for param, own in copies
    ]


class Replicas:
    """k replicas of the user's module, which is the first one."""

    def __init__(
        self, module: LightningModule, devices: Sequence[torch.device], own_streams: bool
    ) -> None:
        self.module, self.devices = module, list(devices)
        self.streams, self.notes = Streams(devices, own_streams), Notes()
        self.state = State(devices, self.notes)
        self.current = 0  # whose turn it is
        self.unknown_code: set[str] = set()  # names of what may edit weights unseen in every step
        self.parameter_sets: dict[str, TensorSet] = {}
        self.buffer_sets: dict[str, TensorSet] = {}
        self.set_of: dict[int, TensorSet] = {}  # of parameters and buffers, by the original's id
        self._found: dict[int, Found] = {}  # by the original's id
        self._layers: list[nn.Module] = []
        self._own: list[list[dict[str, Any]]] = []  # by replica: the `__dict__` of layers, objects
        self._marks: list[tuple[int, int]] = []  # of all parameters when the replicas were equal
        self._buffer_marks: list[tuple[int, int]] = []  # when the step began
        self.is_distrusted = (
            True  # somebody may have edited weights in ways that torch does not count
        )
        self.data_was_read = (
            False  # a step has looked at `.data` of a weight, and may have edited it
        )

    # Weights

    def distrust(self) -> None:
        """Somebody may have edited the first replica's weights unseen."""
        self.is_distrusted = True

    def mark_equal(self) -> None:
        """The replicas are equal now."""
        self._marks, self.is_distrusted = _marks(self.parameter_sets.values()), False

    @property
    def are_as_marked(self) -> bool:
        """Whether replicas were equal and, as far as torch knows, nobody has edited one since."""
        return not self.is_distrusted and self._marks == _marks(self.parameter_sets.values())

    def push_weights(self, knows_code: bool = False) -> None:
        """Copy the first replica's parameters to the others if they may have become other ones.

        After code of the user's they may, unless `knows_code` that none has run.
        """
        for original, *others in self.parameter_sets.values():
            for other in others:
                if attributes := vars(original):  # `weight.decay = 0.1`, which a step may read
                    vars(other).update(attributes)
                if other.requires_grad != original.requires_grad:
                    other.requires_grad_(original.requires_grad)
        if (self.unknown_code and not knows_code) or not self.are_as_marked:
            copy_tensors(self.parameter_sets.values())
            self.mark_equal()

    # A step

    def begin(
        self, step: int, *numbers: int, shared: Sequence[Any] = (), others: Sequence[Any] = ()
    ) -> None:
        """A step begins: give the replicas what the first has. Layers may have come and gone.

        Args:
            step: Which one.
            numbers: Of the epoch and the batch.
            shared: Objects that stay one for all replicas.
            others: Objects besides the module that replicas have a state of.
        """
        self.streams.begin(step, *numbers)
        skipped: set[nn.Module] = {m for m in self.module.modules() if isinstance(m, SHARED)}
        named = list(self.module.named_modules(skipped))
        self._layers = [layer for _, layer in named]
        parameters, buffers = _find(named, "_parameters"), _find(named, "_buffers")
        self._found = parameters | buffers
        self._make_sets()
        self.parameter_sets = self._named_sets(parameters)
        self.buffer_sets = self._named_sets(buffers)
        self.push_weights()
        copy_tensors(self.buffer_sets.values())
        self._buffer_marks, self.data_was_read = _marks(self.buffer_sets.values()), False
        self.state.begin(step, self._layers, shared, others)
        self._own = [
            [self._localized(own, i) for own in stores[: len(self.state.owners)]]
            for i, stores in enumerate(self.state.own)
        ]

    def _make_sets(self) -> None:
        new = [each.tensor for key, each in self._found.items() if key not in self.set_of]
        sets = zip(*[new, *(get_params(new, device) for device in self.devices[1:])])
        known = {**self.set_of, **{id(copies[0]): copies for copies in sets}}
        self.set_of = {key: known[key] for key in self._found}

    def _named_sets(self, found: dict[int, Found]) -> dict[str, TensorSet]:
        return {
            f"{each.prefix}.{each.name}".lstrip("."): self.set_of[key]
            for key, each in found.items()
        }

    def _localized(self, own: dict[str, Any], i: int) -> dict[str, Any]:
        """The `__dict__` of a layer, or of another object, with replica i's tensors in it."""
        if i and "_parameters" in own and "_buffers" in own:
            for name in ("_parameters", "_buffers"):
                if own[name]:
                    own[name] = {key: self.own_tensor(each, i) for key, each in own[name].items()}
            if "_flat_weights" in own:  # what recurrent layers compute with
                own["_flat_weights"] = [self.own_tensor(w, i) for w in own["_flat_weights"]]
            if "_device" in own:  # a LightningModule's
                own["_device"] = self.devices[i]
        return own

    def own_tensor(self, tensor: Any, i: int) -> Any:
        """Replica i's of a parameter or buffer; anything else is what it is."""
        return self.set_of[id(tensor)][i] if id(tensor) in self.set_of else tensor

    @contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Let the module be replica i inside the block, in a step and in its backward pass."""
        self._put_in(i)
        try:
            with current_device(self.devices[i]), self.streams.of(i):
                yield
        finally:
            self._put_in(0)

    def _put_in(self, i: int) -> None:
        if i != self.current:
            self.current = i
            for owner, own in zip(self.state.owners, self._own[i]):
                object.__setattr__(owner, "__dict__", own)

    def statistics(self, i: int) -> list[Tensor]:
        """What BatchNorm layers have tracked in replica i."""
        found = (
            (each, self.set_of[key])
            for key, each in self._found.items()
            if each.name in ("running_mean", "running_var")
        )
        is_tracking = lambda layer: isinstance(layer, _NormBase) and layer.training  # noqa: E731
        return [tensors[i] for each, tensors in found if is_tracking(each.layer)]

    def note_data_read(self, tensor: Tensor) -> None:
        """A step has read `tensor.data`: if that is a weight or buffer, it may edit it unseen."""
        is_weight = isinstance(tensor, nn.Parameter)
        sets = self.buffer_sets.values()
        is_buffer = any(tensor is each for buffers in sets for each in buffers)
        self.data_was_read |= is_weight or is_buffer

    def compare_edited(self, active: Sequence[int]) -> None:
        """Note the weights and buffers that the step has edited, if by what was in its shards.

        The first replica's values are everybody's from now on.
        """
        sets = [*self.parameter_sets.values(), *self.buffer_sets.values()]
        before = [*self._marks, *self._buffer_marks]
        now = [*_marks(self.parameter_sets.values()), *_marks(self.buffer_sets.values())]
        size = len(self.devices)
        for n, tensors in enumerate(sets) if self.data_was_read or now != before else ():
            place = slice(n * size, (n + 1) * size)
            each = self._found[id(tensors[0])]
            compared = [tensors[i] for i in active]
            alike = {(one.shape, one.dtype, one.layout) for one in compared}
            is_edited = self.data_was_read or now[place] != before[place]
            # of another shape it is a shard's own output; BatchNorm's statistics are averaged
            is_state = len(alike) == 1 and not isinstance(each.layer, _NormBase)
            if is_edited and is_state and compared[0].layout == torch.strided:
                self.notes.compare(
                    f"A step edits {each.name} of {type(each.layer).__name__} by what is in its "
                    "shard. The first replica's value is kept for all: edit it in a hook, for "
                    "example `on_train_batch_start`.",
                    compared,
                )
        self.is_distrusted |= self.data_was_read

    def release(self) -> None:
        """Let go of all copies. Cycles would keep them until Python's collector runs."""
        self.streams.begin()
        self.state.clear()
        del self._layers[:], self._own[:], self._marks[:], self._buffer_marks[:]
        for held in (self.parameter_sets, self.buffer_sets, self.set_of, self._found):
            held.clear()  # type: ignore[attr-defined]
        self.state.kept.clear()


def _find(named: list[tuple[str, nn.Module]], where: str) -> dict[int, Found]:
    """All parameters, or all buffers, by their ids."""
    found: dict[int, Found] = {}
    for prefix, layer in named:
        for name, tensor in vars(layer)[where].items():
            if tensor is not None:
                found.setdefault(id(tensor), Found(tensor, layer, name, prefix))
    return found


@torch.no_grad()
def copy_tensors(sets: Iterable[TensorSet]) -> None:
    """Give the first tensor's values to the others of its set."""
    columns = list(zip(*sets))  # one per replica
    for others in columns[1:]:
        for first, other in zip(columns[0], others):
            if (other.shape, other.dtype) != (first.shape, first.dtype):  # somebody has set `.data`
                other.data = torch.empty_like(first, device=other.device)
        # by `.data`: a hook may have edited weights before the backward pass, which checks versions
        copy_all([data_of(other) for other in others], columns[0])


def _marks(sets: Iterable[TensorSet]) -> list[tuple[int, int]]:
    """What changes with an edit: torch counts those in place; setting `.data` moves a tensor."""
    tensors = (tensor for tensors in sets for tensor in tensors)
    return [
        (0 if t.is_inference() else t._version, t.data_ptr() if t.layout == torch.strided else 0)
        for t in tensors
    ]


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
