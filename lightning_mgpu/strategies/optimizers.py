"""Every replica updates itself, as in the book: copies of the user's optimizers, which make the same update."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.strategies.generators import are_equal, generator_states, same_generator_states
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.shards import leaves
from lightning_mgpu.strategies.twins import CONTAINERS, PLAIN

Settings = list[dict[str, Any]]


class ReplicaOptimizers:
    """`copies[i - 1][n]` is replica i's own copy of the user's optimizer n.

    Args:
        replicas: Whose parameters they update.
        optimizers: The user's.
        give: Gives the replicas the gradients of the original's, as they are when an update begins.
    """

    def __init__(self, replicas: Replicas, optimizers: Sequence[Optimizer], give: Callable[[], Any]) -> None:
        self.replicas, self.originals, self.give = replicas, list(optimizers), give
        originals, *others = zip(*replicas.parameters) if replicas.parameters else [()] * len(replicas.modules)
        self._mappings = [dict(zip(map(id, originals), copies)) for copies in others]
        is_mixed = len({device.type for device in replicas.devices}) > 1  # a CPU and a GPU round differently
        self.repeats = [False if is_mixed or not _is_repeatable(opt) else None for opt in self.originals]
        self.copies = [[self._copy(n, mapping) for n in range(len(self.originals))] for mapping in self._mappings]
        self._first_states = [_first_state(opt) for opt in self.originals]
        self._begun: dict[int, Settings] = {}  # the settings an original's update began with, by its number
        self._closed: dict[int, Settings] = {}  # and those at the end of its closure
        self._arguments: dict[str, Any] = {}  # others than the closure
        self._streams: list[Tensor] = []  # generator states then

    def begin(self, n: int) -> None:
        """Original n is about to be stepped."""
        self._begun.pop(n, None)

    def watch(self, n: int, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """A `step_pre_hook` of original n: note the settings it makes its update with, and give its gradients.

        Afterwards they may be others: some optimizers count their steps in the settings, or edit gradients.
        """
        if n in self._begun:  # the step of a class calls that of its base
            return None
        self._closed.pop(n, None)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._arguments = {name: value for name, value in kwargs.items() if name != "closure"}

        def note() -> Settings:
            self.give()
            self._streams = generator_states(self.replicas.devices[0])
            return settings_of(optimizer)

        if not callable(closure):
            self._begun[n] = note()
            return None
        self._begun[n], self._streams = settings_of(optimizer), generator_states(self.replicas.devices[0])

        def watched() -> Any:
            loss = closure()
            self._closed[n] = note()
            return loss

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def follow(self) -> None:
        """Give the copies the settings that schedulers and callbacks gave the originals: rates, new groups."""
        for n, optimizer in enumerate(self.originals):
            self._follow(n, settings_of(optimizer))

    def update(self, n: int, closure: Callable[[], Any], can_repeat: bool) -> None:
        """Let optimizer n of every replica make the update the original has made, or give them its result.

        That an optimizer can be repeated is tried out once: one that depends on the time of day, say, cannot.
        """
        is_random = not are_equal(self._streams, generator_states(self.replicas.devices[0]))
        if not can_repeat or is_random:
            self.repeats[n] = False  # for good: its copies have missed an update
        if self.repeats[n] is False:
            self.replicas.broadcast_parameters()
            return
        before, self._first_states[n] = self._first_states[n], _first_state(self.originals[n])
        if before is not None and before is not self._first_states[n]:  # somebody has cleared or loaded its state
            self._copy_again(n)
            self.replicas.broadcast_parameters()
            return
        is_first = self.repeats[n] is None
        with same_generator_states(self.replicas.devices) if is_first else contextlib.nullcontext():
            if n in self._begun:  # else the copies were made since
                self._follow(n, self._begun[n])
            try:
                for i, (copies, device) in enumerate(zip(self.copies, self.replicas.devices[1:])):
                    with torch.cuda.device(device if device.type == "cuda" else -1):  # kernels start on the current one
                        copies[n].step(closure=partial(self._close, i, n, closure), **self._arguments)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(n, error)
        if is_first:
            self.repeats[n] = self.repeats[n] is None and self.replicas.agree()
            if not self.repeats[n]:
                self.replicas.broadcast_parameters()
        self.replicas.mark_equal()

    def _close(self, i: int, n: int, closure: Callable[[], Any]) -> Any:
        """The closure of copy i: the settings are then what they were at the end of the original's."""
        if n in self._closed:
            follow(self._closed[n], self.copies[i][n], self._mappings[i])
        return closure()

    def _follow(self, n: int, settings: Settings) -> None:
        for copies, mapping in zip(self.copies, self._mappings):
            follow(settings, copies[n], mapping)

    def try_again(self) -> None:
        """Find out in the next update whether copies still make the originals': callbacks may have edited states."""
        self.repeats = [None if repeat else repeat for repeat in self.repeats]

    def _copy(self, n: int, mapping: dict[int, nn.Parameter]) -> Optimizer:
        originals = [original for original, *_ in self.replicas.parameters]
        try:
            return copy_optimizer(self.originals[n], originals, list(mapping.values()))
        except Exception as error:
            self._give_up(n, error)
            return copy_optimizer(self.originals[n], originals, list(mapping.values()), share=True)

    def _copy_again(self, n: int) -> None:
        for copies, mapping in zip(self.copies, self._mappings):
            vars(copies[n]).update(vars(self._copy(n, mapping)))

    def _give_up(self, n: int, error: Exception) -> None:
        self.repeats[n] = False
        name, reason = type(self.originals[n]).__name__, f"{type(error).__name__}: {error}"
        rank_zero_info(f"Replicas are given the updates of {name}, which cannot be copied ({reason}).")


def copy_optimizer(
    optimizer: Optimizer, originals: Sequence[nn.Parameter], copies: Sequence[nn.Parameter], share: bool = False
) -> Optimizer:
    """A replica's own optimizer: the same class, settings and state, for the replica's parameters.

    Hooks stay with the original, and so does the `step` a scheduler puts on it. Optimizers inside are copied alike.

    Args:
        optimizer: The user's.
        originals, copies: The module's parameters, and the replica's.
        share: Share what cannot be copied.
    """
    memo: dict[int, Any] = {id(original): parameter for original, parameter in zip(originals, copies)}
    return _copied(optimizer, memo, share)


def _copied(optimizer: Optimizer, memo: dict[int, Any], share: bool) -> Optimizer:
    own: dict[str, Any] = {name: value for name, value in vars(optimizer).items() if name != "step"}
    own.update({name: OrderedDict() for name in own if name.endswith("_hooks")})
    replica = memo[id(optimizer)] = object.__new__(type(optimizer))
    for inner in leaves(list(own.values())):
        if isinstance(inner, Optimizer) and id(inner) not in memo:  # pickled, and so copied, without what is its own
            _copied(inner, memo, share)
    for name, value in own.items():
        try:
            own[name] = copy.deepcopy(value, memo)
        except Exception:
            if not share:
                raise
    vars(replica).update(own)
    device = next((p.device for group in replica.param_groups for p in group["params"]), torch.device("cpu"))
    vars(replica).update({name: _on(device, own[name]) for name in own if name not in ("state", "param_groups")})
    for parameter, state in replica.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            state[name] = _on(parameter.device, value, parameter.shape)
    return replica


def _on(device: torch.device, value: Any, shape: torch.Size | None = None) -> Any:
    """Tensors in a state on a device; but a step counter on the CPU stays where the optimizer keeps it."""

    def moves(tensor: Tensor) -> bool:
        return tensor.device != device and (tensor.shape == shape or not tensor.is_cpu)

    if not any(isinstance(part, Tensor) and moves(part) for part in leaves(value)):
        return value  # a list that lies in two places stays one
    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device) if moves(tensor) else tensor)


def settings_of(optimizer: Optimizer) -> Settings:
    """What is in the parameter groups now, and after them the optimizer's own numbers; what may change is copied."""
    own = {name: value for name, value in vars(optimizer).items() if isinstance(value, PLAIN)}
    groups = [
        {key: value if key == "params" else _snapshot(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return [*groups, own]


def follow(settings: Settings, replica: Optimizer, mapping: dict[int, nn.Parameter]) -> None:
    """Give a replica's optimizer the settings of the original, and the parameters added to it since."""
    *groups, plain = settings
    vars(replica).update(plain)
    for i, group in enumerate(groups):
        if i == len(replica.param_groups):  # unfrozen layers, say
            parameters = [mapping[id(parameter)] for parameter in group["params"]]
            replica.add_param_group({**copy.deepcopy(_without_parameters(group)), "params": parameters})
        own = replica.param_groups[i]
        for key, value in _without_parameters(group).items():
            if not isinstance(value, Tensor):
                own[key] = _snapshot(value)
            elif isinstance(own.get(key), Tensor):
                own[key].copy_(value)
            else:
                own[key] = value.to("cpu" if value.is_cpu else own["params"][0].device, copy=True)


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, CONTAINERS) else value


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _first_state(optimizer: Optimizer) -> Any:
    """The first parameter's state, which is another object after `state.clear()` or `load_state_dict`."""
    return next((state for state in optimizer.state.values() if isinstance(state, dict)), None)


def _is_repeatable(optimizer: Optimizer) -> bool:
    """Not one that evaluates the loss several times, nor one with hooks of the user's, which copies do not have."""
    return not (
        isinstance(optimizer, LBFGS) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


class SchedulerView:
    """A learning-rate scheduler as replicas above 0 see it: replica 0 steps it, for all."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)
