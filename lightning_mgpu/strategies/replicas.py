"""One module, k sets of parameters: `with replicas.turn(i)` puts set i into it, as in the book's `lenet(X, params)`.

A module keeps everything it has, its parameters and buffers too, in its `__dict__`. So a replica is a list of such
dicts, one a layer, with tensors of its own in them. All else in them (hooks, metrics, lists) is the one object it
always was. A turn exchanges the dicts. So an attribute that a step assigns is seen by this replica alone.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import (
    _BatchNorm,
    _NormBase,
)  # the latter are all that have running statistics
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_mgpu.allreduce.messages import add_all, copy_all
from lightning_mgpu.strategies.one_process import current_device, device_module
from lightning_mgpu.strategies.split_batch import bring_home, send

SHARED = (
    Metric,
    MetricCollection,
    MetricTracker,
    torch.jit.ScriptModule,
)  # one for all replicas, states included
KINDS = ("_parameters", "_buffers")
TENSORS = (*KINDS, "_modules", "_flat_weights", "_device")
PLAIN = (int, float, str, type(None))  # of these the first replica's count for all
MISSING = object()
# hooks that run between a step and its backward pass
BEFORE_BACKWARD = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward")
Copies = tuple[
    Tensor, ...
]  # of a parameter or a buffer, one a replica; the first is the user's own
Key = tuple[
    int, str, str
]  # of a parameter or a buffer: its layer's number, `_parameters` or `_buffers`, its name
Said = tuple[str, str, str]  # the same with the name of the layer's class, as a warning says it


def get_params(params: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """A replica's own parameters, as in the book: copies on its device. Buffers, too."""
    with torch.inference_mode(False), torch.no_grad():
        copies = [(param, param.detach().to(device, copy=True)) for param in params]
    return [
        nn.Parameter(own, p.requires_grad) if isinstance(p, nn.Parameter) else own
        for p, own in copies
    ]


class Replicas:
    """k replicas of the user's module, which is the first one."""

    def __init__(
        self, module: LightningModule, devices: Sequence[torch.device], own_streams: bool
    ) -> None:
        self.module, self.devices, self.streams = (
            module,
            list(devices),
            Streams(devices, own_streams),
        )
        self.current = 0  # whose turn it is
        self.is_stale = (
            True  # somebody may have edited the original in ways that torch does not count
        )
        self.hooks: set[str] = set()  # the names of the user's around this step: so may they
        self.copies: dict[str, Copies] = {}  # of every parameter, by its name
        self.copies_of: dict[int, Copies] = {}  # of parameters and buffers, by the original's id
        self._marks: list[tuple[int, int]] = []  # of all parameters when the replicas were equal
        self._owners: list[nn.Module] = []  # layers
        self._dicts: list[list[dict[str, Any]]] = []  # by replica and layer
        self._put: list[list[dict[str, Any]]] = []  # the same, when the step began
        self._kind = 0  # of step: what a training step has assigned, validation does not see
        self._kept: dict[
            tuple[int, int, nn.Module], dict[str, tuple[Any, ...]]
        ] = {}  # by kind of step and replica
        self._meet = False  # whether replicas meet in this step
        self._is_in_order = True  # whether they run one after the other, the first one first
        self.is_watched = True  # after the next step parameters are compared, and buffers
        self._began: dict[
            Key, tuple[int, int]
        ] = {}  # marks of the first replica's buffers when the step began
        self._disagree: dict[
            Said, Tensor
        ] = {}  # buffers that steps have edited: whether replicas hold other values
        self._lists: list[
            tuple[list[Any], int, list[Any]]
        ] = []  # a list, its length before, a replica's own

    @property
    def parameters(self) -> list[Copies]:
        """For every parameter its copies, one a replica."""
        return list(self.copies.values())

    def begin(self, kind: int, *number: int, meet: bool, is_in_order: bool) -> None:
        """A step begins: give the replicas what the original has. Layers may have come and gone since the last one.

        The numbers name the step. Replicas that meet in it have lists and dicts of their own. Those that run in another
        order than theirs have lists of their own.
        """
        self._kind = kind
        self.streams.begin(kind, *number)
        named = list(
            self.module.named_modules(
                {each for each in self.module.modules() if isinstance(each, SHARED)}
            )
        )
        self._owners = [owner for _, owner in named]
        self.copies, buffers = (
            self._find_copies(named, "_parameters"),
            self._find_copies(named, "_buffers"),
        )
        self.copies_of = {
            id(copies[0]): copies for copies in (*self.copies.values(), *buffers.values())
        }
        self.copy_edited(self.hooks)
        copy_tensors(buffers.values())
        self._meet, self._is_in_order, self._lists = meet, is_in_order, []
        self._dicts = [
            [self._replica_of(owner, i) for owner in self._owners] for i in range(len(self.devices))
        ]
        self._put = [[dict(own) for own in dicts] for dicts in self._dicts]
        self._began = self._buffer_marks()

    def release(self) -> None:
        """Training is over: let go of all copies. Cycles would keep them until Python's collector runs."""
        self.streams.begin()
        del self._owners[:], self._dicts[:], self._put[:], self._lists[:], self._marks[:]
        for held in (self.copies, self.copies_of, self._kept, self._began, self._disagree):
            held.clear()  # type: ignore[attr-defined]

    def copy_of(self, tensor: Any, i: int) -> Any:
        """Replica i's copy of a parameter or buffer; anything else is what it is."""
        return self.copies_of[id(tensor)][i] if id(tensor) in self.copies_of else tensor

    def _find_copies(self, named: list[tuple[str, nn.Module]], kind: str) -> dict[str, Copies]:
        """The copies of all parameters or buffers by their names. Some are new."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, owner in named:
            for name, tensor in owner.__dict__[kind].items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{prefix}.{name}".lstrip("."), tensor))
        new = [tensor for key, (_, tensor) in found.items() if key not in self.copies_of]
        sets = [new, *(get_params(new, device) for device in self.devices[1:])]
        known = {**self.copies_of, **{id(copies[0]): copies for copies in zip(*sets)}}
        return {name: known[key] for key, (name, _) in found.items()}

    def copy_edited(self, hooks: Collection[str] = ()) -> None:
        """Copy the first replica's parameters to the others if one was edited, or may have been by these hooks."""
        for original, *others in self.parameters:
            for other in others:
                if attributes := vars(original):  # `weight.decay = 0.1`, which a step may read
                    vars(other).update(attributes)
                if other.requires_grad != original.requires_grad:
                    other.requires_grad_(original.requires_grad)
        if self.is_stale or hooks or self._marks != self._find_marks():
            copy_tensors(self.parameters)
            self.remember()

    def copy_parameters(self) -> None:
        """Copy all of the first replica's parameters to the others."""
        self.is_stale = True
        self.copy_edited()

    def remember(self) -> None:
        """Remember that the replicas are equal now."""
        self._marks, self.is_stale = self._find_marks(), False

    def _find_marks(self) -> list[tuple[int, int]]:
        return _marks(tensor for copies in self.parameters for tensor in copies)

    def _replica_of(self, owner: nn.Module, i: int) -> dict[str, Any]:
        """The `__dict__` of a layer in replica i. The first one's is its own."""
        if i == 0:
            return owner.__dict__
        own = dict(owner.__dict__)
        for kind in KINDS:
            if own[kind]:
                own[kind] = {name: self.copy_of(tensor, i) for name, tensor in own[kind].items()}
        if "_flat_weights" in own:  # what recurrent layers compute with
            own["_flat_weights"] = [self.copy_of(weight, i) for weight in own["_flat_weights"]]
        if "_device" in own:  # a LightningModule's
            own["_device"] = self.devices[i]
        for name, value in owner.__dict__.items() if self.devices[i] != self.devices[0] else ():
            if isinstance(value, (Tensor, tuple)):  # which a hook has put there
                own[name] = send(value, self.devices[0], self.devices[i])
        for name, value in (
            owner.__dict__.items() if not type(owner).__module__.startswith("torch.") else ()
        ):
            if type(value) in (list, dict) and name not in TENSORS:
                is_own = self._meet or (type(value) is list and not self._is_in_order)
                own[name] = copy.copy(value) if is_own else value
                if type(value) is list:
                    self._lists.append((value, len(value), own[name]))
        kept = self._kept.get((self._kind, i, owner), {})
        for name, (value, base, versions) in kept.items():
            if (
                owner.__dict__.get(name, MISSING) is base and _versions(base) == versions
            ):  # no hook has changed it
                own[name] = value
        return own

    def end(self, active: Sequence[int]) -> None:
        """A step is over. A tensor or an object that it has assigned, `self.state` say, is the replica's from now on.

        It is, until a hook assigns another one, or edits the first replica's. A replica that was not active goes on
        with what the first one has.
        """
        for collected, length, others in self._lists:  # `self.outputs.append(...)`
            end = length if others is collected else len(collected)
            collected[end:] = bring_home(others[length:], self.devices[0])
        edited = [key for key, mark in self._buffer_marks().items() if mark != self._began.get(key)]
        if self.is_watched:
            wrong = _warn_of(self._find_disagreements(active, self._watched(0, KINDS)))
            self.is_stale |= any(kind == "_parameters" for _, kind, _ in wrong)
            self.is_watched = False
        elif edited:  # looked at when the epoch ends: no step waits for the answer
            for key, flag in self._find_disagreements(active, edited).items():
                self._disagree[key] = self._disagree[key] | flag if key in self._disagree else flag
        for i in active:
            for owner, own, put in zip(self._owners, self._dicts[i], self._put[i]):
                for name, value in own.items():
                    if value is not put.get(name, MISSING) and not (
                        name in TENSORS or isinstance(value, PLAIN)
                    ):
                        base = owner.__dict__.get(name, MISSING)
                        kept = self._kept.setdefault((self._kind, i, owner), {})
                        kept[name] = value, base, _versions(base)

    def _watched(self, i: int, kinds: Sequence[str]) -> dict[tuple[int, str, str], Tensor]:
        """Replica i's parameters and buffers, by layer, kind and name. Statistics of BatchNorm are averaged."""
        layers = [
            (n, own)
            for n, own in enumerate(self._dicts[i])
            if not isinstance(self._owners[n], _NormBase)
        ]
        named = [
            (n, kind, name, tensor)
            for n, own in layers
            for kind in kinds
            for name, tensor in own[kind].items()
        ]
        return {
            (n, kind, name): t
            for n, kind, name, t in named
            if t is not None and t.layout == torch.strided
        }

    def _buffer_marks(self) -> dict[Key, tuple[int, int]]:
        buffers = self._watched(0, ["_buffers"])
        return dict(zip(buffers, _marks(buffers.values())))

    def _find_disagreements(self, active: Sequence[int], keys: Iterable[Key]) -> dict[Said, Tensor]:
        """For each of these parameters and buffers whether replicas hold other values, as a 0-d tensor."""
        first, others = self._watched(0, KINDS), [self._watched(i, KINDS) for i in active]
        flags: dict[Said, Tensor] = {}
        for key in keys:
            own, said = first[key], (type(self._owners[key[0]]).__name__, *key[1:])
            for other in (each[key] for each in others if key in each):
                if (other.shape, other.dtype) == (
                    own.shape,
                    own.dtype,
                ):  # else it is a shard's own, as an output
                    flag = differ(own, other)
                    flags[said] = flags[said] | flag if said in flags else flag
        return flags

    def warn_of_edited_buffers(self) -> None:
        """Warn of buffers that steps have edited by what was in their shards. The host waits, once."""
        _warn_of(self._disagree)
        self._disagree.clear()

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
            own = [self._dicts[i][n]["_buffers"][name] for n, name in norms]
            add_all(means, own, alpha=size / sum(sizes.values()))
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
        copy_all([other.data for other in others], sets[0])


def _warn_of(flags: Mapping[Said, Tensor]) -> list[Said]:
    wrong = [said for said, is_wrong in zip(flags, to_bools(flags.values())) if is_wrong]
    for layer, _, name in wrong:
        rank_zero_warn(
            f"A step edits {name} of {layer} by what is in its shard. The first replica's value is "
            "kept for all: edit it in a hook, for example `on_train_batch_start`."
        )
    return wrong


def differ(tensor: Tensor, other: Tensor) -> Tensor:
    """Whether two tensors of one shape are other numbers (NaN is equal to NaN), as a 0-d tensor.

    The host does not wait for the device before the value is read, see `to_bools`.
    """
    other = other.detach().to(tensor.device)
    if tensor.is_cpu and torch.equal(
        tensor, other
    ):  # the fastest way, where there is nothing to wait for
        return torch.zeros((), dtype=torch.bool)
    are_nan = (tensor != tensor) & (other != other)
    return ((tensor != other) & ~are_nan).any()


def to_bools(flags: Iterable[Tensor]) -> list[bool]:
    """The values of 0-d tensors. The host waits for the devices once."""
    flags = list(flags)
    return torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []


def check_layers(module: nn.Module, sync_batchnorm: bool) -> None:
    """Refuse layers that replicas would train wrongly, in one line with the fix."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise MisconfigurationException(
                f"{name}: {type(layer).__name__}(max_norm=...) edits its weights in `forward`: each replica would edit "
                "others. Use one device, or shorten the rows in `on_train_batch_start`."
            )
        is_compiled = (
            isinstance(layer, torch._dynamo.OptimizedModule)
            or layer._compiled_call_impl is not None
        )
        if (
            sync_batchnorm
            and is_compiled
            and any(isinstance(part, _BatchNorm) for part in layer.modules())
        ):
            raise MisconfigurationException(  # its graph does not call `F.batch_norm`
                "sync_batchnorm=True does not reach BatchNorm in compiled layers: leave one of the two out."
            )


def _marks(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What changes with an edit: torch counts those in place, but not of `.data`; setting `.data` moves it."""
    return [
        (0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors
    ]


def _versions(value: Any) -> list[int]:
    """How often a tensor, or each in a tuple, was edited in place."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]


class Streams:
    """The random streams of k replicas. The first draws from the global generators, as one device, or has its own."""

    def __init__(self, devices: Sequence[torch.device], all_own: bool) -> None:
        self.devices, self.all_own = devices, all_own
        self.begin()

    def begin(self, *number: int) -> None:
        """A step begins. The numbers name it: its kind, epoch and batch."""
        self._number = number
        self._states: dict[int, list[Tensor]] = {}  # of generators, by replica

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw replica i's numbers inside the block; a step may enter it several times."""
        if i == 0 and not self.all_own:
            yield
            return
        device, module = self.devices[i], device_module(self.devices[i])
        own = (
            [torch] if module is None else [torch, module]
        )  # a step draws from the CPU's generator, too
        with torch.random.fork_rng(
            [] if module is None else [device.index], device_type=device.type
        ):
            if i not in self._states:
                seed = (
                    hash((torch.initial_seed(), *self._number, i)) % 2**63
                )  # of integers: so in every process
                kinds = [torch.device("cpu"), device][: len(own)]
                self._states[i] = [
                    torch.Generator(kind).manual_seed(seed).get_state() for kind in kinds
                ]
            for each, state in zip(own, self._states[i]):
                each.set_rng_state(state)
            yield
            self._states[i] = [each.get_rng_state() for each in own]
