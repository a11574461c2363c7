"""One module, k sets of parameters: `with replicas.turn(i)` puts set i into it, as in the book's `lenet(X, params)`.

A module keeps everything it has, its parameters and buffers too, in its `__dict__`. So a replica is a list of such
dicts, one a layer, with tensors of its own in them. All else in them (hooks, metrics, lists) is the one object it
always was. A turn exchanges the dicts. So an attribute that a step assigns is seen by this replica alone.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # BatchNorm, InstanceNorm: those with running statistics
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_mgpu.strategies.gather import bring_home
from lightning_mgpu.strategies.one_process import current_device
from lightning_mgpu.strategies.streams import Streams

SHARED = (Metric, MetricCollection, MetricTracker, torch.jit.ScriptModule)  # one for all replicas, states included
TENSORS = ("_parameters", "_buffers", "_modules", "_flat_weights", "_device")
PLAIN = (int, float, str, type(None))  # of these the first replica's count for all
MISSING = object()
Copies = tuple[Tensor, ...]  # of a parameter or a buffer, one a replica; the first is the user's own


def get_params(params: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A replica's own parameters, as in the book: copies on its device. Buffers, too."""
    with torch.inference_mode(False), torch.no_grad():
        copies = [(param, param.detach().to(device, copy=True)) for param in params]
    return [nn.Parameter(own, p.requires_grad) if isinstance(p, nn.Parameter) else own for p, own in copies]


class Replicas:
    """k replicas of the user's module, which is the first one."""

    def __init__(self, module: LightningModule, devices: Sequence[torch.device], streams: Streams) -> None:
        self.module, self.devices, self.streams = module, list(devices), streams
        self.current = 0  # whose turn it is
        self.is_stale = True  # somebody may have edited the original in ways that torch does not count
        self.copies: dict[str, Copies] = {}  # of every parameter, by its name
        self.copies_of: dict[int, Copies] = {}  # of parameters and buffers, by the original's id
        self._marks: dict[int, list[tuple[int, int]]] = {}  # of parameters' copies when they were equal
        self._owners: list[nn.Module] = []  # layers
        self._dicts: list[list[dict[str, Any]]] = []  # by replica and layer
        self._put: list[list[dict[str, Any]]] = []  # the same, when the step began
        self._kept: list[dict[nn.Module, dict[str, tuple[Any, ...]]]] = [{} for _ in devices]  # what steps have rebound
        self._meet = False
        self._lists: list[tuple[list[Any], int, list[Any]]] = []  # a list, its length before, a replica's own

    @property
    def parameters(self) -> list[Copies]:
        """For every parameter its copies, one a replica."""
        return list(self.copies.values())

    def begin(self, *number: int, meet: bool = False) -> None:
        """A step begins: give the replicas what the original has. Layers may have come and gone since the last one.

        The number names the step. Replicas that meet in it have lists and dicts of their own.
        """
        self.streams.begin(*number)
        named = list(_walk(self.module))
        self._owners = [owner for _, owner in named]
        self.copies, buffers = self._find_copies(named, "_parameters"), self._find_copies(named, "_buffers")
        self.copies_of = {id(copies[0]): copies for copies in (*self.copies.values(), *buffers.values())}
        self.copy_edited()
        copy_tensors(buffers.values())
        self._meet, self._lists = meet, []
        self._dicts, self._put = [[owner.__dict__ for owner in self._owners]], [[]]
        for i in range(1, len(self.devices)):
            self._dicts.append([self._replica_of(owner, i) for owner in self._owners])
            self._put.append([dict(own) for own in self._dicts[i]])

    def copy_of(self, tensor: Any, i: int) -> Any:
        """Replica i's copy of a parameter or buffer; anything else is what it is."""
        return self.copies_of[id(tensor)][i] if id(tensor) in self.copies_of else tensor

    def _find_copies(self, named: list[tuple[str, nn.Module]], kind: str) -> dict[str, Copies]:
        """The copies of all parameters or buffers by their names. Some are new."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, owner in named:
            for name, tensor in owner.__dict__[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), (prefix + name, tensor))
        new = [tensor for key, (_, tensor) in found.items() if key not in self.copies_of]
        sets = [new, *(get_params(new, device) for device in self.devices[1:])]
        known = {**self.copies_of, **{id(copies[0]): copies for copies in zip(*sets)}}
        return {name: known[key] for key, (name, _) in found.items()}

    def copy_edited(self) -> None:
        """Copy the first replica's parameters to the others, where somebody has edited one; all of them if in doubt."""
        for original, *others in self.parameters:
            for other in others:
                if attributes := vars(original):  # `weight.decay = 0.1`, which a step may read
                    vars(other).update(attributes)
                if other.requires_grad != original.requires_grad:
                    other.requires_grad_(original.requires_grad)
        edited = [c for c in self.parameters if self.is_stale or self._marks.get(id(c[0])) != _marks(c)]
        copy_tensors(edited)
        self.remember(edited)
        self.is_stale = False

    def remember(self, equal: Iterable[Copies]) -> None:
        """Remember that these copies are equal now."""
        self._marks.update({id(copies[0]): _marks(copies) for copies in equal})

    def copy_parameters(self) -> None:
        """Copy all of the first replica's parameters to the others."""
        self.is_stale = True
        self.copy_edited()

    def _replica_of(self, owner: nn.Module, i: int) -> dict[str, Any]:
        """The `__dict__` of a layer in replica i."""
        own = dict(owner.__dict__)
        for kind in ("_parameters", "_buffers"):
            if own[kind]:
                own[kind] = {name: self.copy_of(tensor, i) for name, tensor in own[kind].items()}
        if "_flat_weights" in own:  # what recurrent layers compute with
            own["_flat_weights"] = [self.copy_of(weight, i) for weight in own["_flat_weights"]]
        if "_device" in own:  # a LightningModule's
            own["_device"] = self.devices[i]
        if self.devices[i] != self.devices[0]:
            own.update({name: self._moved(value, i) for name, value in own.items() if name not in TENSORS})
        for name, value in owner.__dict__.items() if not type(owner).__module__.startswith("torch.") else ():
            if type(value) in (list, dict) and name not in TENSORS:
                if self._meet:
                    own[name] = copy.copy(value)
                if type(value) is list:
                    self._lists.append((value, len(value), own[name]))
        kept = self._kept[i].get(owner, {})
        for name, (value, base, versions) in kept.items():
            if owner.__dict__.get(name, MISSING) is base and _versions(base) == versions:  # no hook has changed it
                own[name] = value
        return own

    def _moved(self, value: Any, i: int) -> Any:
        """A tensor, or a tuple of them, from the first device to replica i's."""
        if isinstance(value, Tensor):
            return value.to(self.devices[i]) if value.device == self.devices[0] else value
        return tuple(self._moved(item, i) for item in value) if type(value) is tuple else value

    def end(self, active: Iterable[int]) -> None:
        """A step is over. A tensor or an object that it has assigned, `self.state` say, is the replica's from now on.

        It is, until a hook assigns another one, or edits the first replica's. A replica that was not active goes on
        with what the first one has.
        """
        for collected, length, others in self._lists:  # `self.outputs.append(...)`
            end = length if others is collected else len(collected)
            collected[end:] = bring_home(others[length:], self.devices[0])
        for i in active:
            for owner, own, put in zip(self._owners, self._dicts[i], self._put[i]):
                for name, value in own.items():
                    if value is not put.get(name, MISSING) and name not in TENSORS and not isinstance(value, PLAIN):
                        base = owner.__dict__.get(name, MISSING)
                        self._kept[i].setdefault(owner, {})[name] = value, base, _versions(base)

    @torch.no_grad()
    def average_statistics(self, sizes: dict[int, int]) -> None:
        """Average what BatchNorm has tracked, weighted by the samples of each replica: a moving average is linear.

        It is written by `.data`: the backward pass may have kept the tensor, and checks that nobody has edited it.
        """
        norms = [
            (n, name)
            for n, owner in enumerate(self._owners)
            if isinstance(owner, _NormBase) and owner.training and owner.running_mean is not None
            for name in ("running_mean", "running_var")
        ]
        if not norms:
            return
        originals = [self._dicts[0][n]["_buffers"][name] for n, name in norms]
        means = [torch.zeros_like(original) for original in originals]
        for i, size in sizes.items():
            own = [self._dicts[i][n]["_buffers"][name].to(self.devices[0]) for n, name in norms]
            torch._foreach_add_(means, own, alpha=size / sum(sizes.values()))
        torch._foreach_copy_([original.data for original in originals], means)

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
            for owner, own in zip(self._owners, self._dicts[i]):
                object.__setattr__(owner, "__dict__", own)


@torch.no_grad()
def copy_tensors(all_copies: Iterable[Copies]) -> None:
    """Give the first tensor's values to its copies."""
    sets = list(zip(*all_copies))  # one a replica
    for others in sets[1:]:
        for first, other in zip(sets[0], others):
            if (other.shape, other.dtype) != (first.shape, first.dtype):  # somebody has set `.data`
                other.data = torch.empty_like(first, device=other.device)
        # by `.data`: a hook may have edited weights before the backward pass, which checks versions
        torch._foreach_copy_([other.data for other in others], sets[0])


def _marks(copies: Copies) -> list[tuple[int, int]]:
    """What changes with an edit: torch counts edits in place, but not those of `.data`; setting `.data` moves it."""
    return [(tensor._version, tensor.data_ptr()) for tensor in copies]


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer whose tensors a turn exchanges, with the prefix of its parameters' names."""
    todo: list[tuple[str, nn.Module]] = [("", module)]
    seen = set()
    while todo:
        prefix, owner = todo.pop()
        if owner in seen or isinstance(owner, SHARED):
            continue
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None:
            raise MisconfigurationException(
                f"{prefix[:-1]}: {type(owner).__name__}(max_norm=...) edits its weights in `forward`: each replica "
                "would edit others. Use one device, or shorten the rows in `on_train_batch_start`."
            )
        seen.add(owner)
        yield prefix, owner
        children = [(f"{prefix}{name}.", child) for name, child in owner._modules.items() if child is not None]
        todo.extend(reversed(children))


def _versions(value: Any) -> list[int]:
    """How often a tensor, or each in a tuple, was edited in place."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
