"""Every replica updates itself, as in the book: copies of the user's optimizers, which make the same update."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.team import same_generator_states


class ReplicaOptimizers:
    """`copies[i - 1][n]` is replica i's own copy of the user's optimizer n."""

    def __init__(self, replicas: Replicas, optimizers: Sequence[Optimizer]) -> None:
        self.replicas, self.originals = replicas, list(optimizers)
        originals, *others = zip(*replicas.parameters) if replicas.parameters else [()] * len(replicas.modules)
        self.copies = [[copy_optimizer(opt, originals, copies) for opt in self.originals] for copies in others]
        self._mappings = [dict(zip(map(id, originals), copies)) for copies in others]
        is_mixed = len({device.type for device in replicas.devices}) > 1  # a CPU and a GPU round differently
        self._first_states = [_first_state(opt) for opt in self.originals]
        self.repeats = [False if is_mixed or not _is_repeatable(opt) else None for opt in self.originals]

    def follow(self) -> None:
        """Give the copies the settings that schedulers and callbacks gave the originals: rates, new groups."""
        for copies, mapping in zip(self.copies, self._mappings):
            for optimizer, replica in zip(self.originals, copies):
                follow(optimizer, replica, mapping)

    def update(self, n: int, closure: Callable[[], Any], can_repeat: bool) -> None:
        """Let optimizer n of every replica make the update the original has made, or give them its result.

        That an optimizer can be repeated is tried out once: one that draws random numbers, say, cannot.
        """
        if not can_repeat:
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
        with same_generator_states(set(self.replicas.devices) if is_first else ()):
            for copies, mapping, device in zip(self.copies, self._mappings, self.replicas.devices[1:]):
                follow(self.originals[n], copies[n], mapping)
                with torch.cuda.device(device if device.type == "cuda" else -1):  # kernels start on the current one
                    copies[n].step(closure)
        if is_first:
            self.repeats[n] = self.replicas.agree()
            if not self.repeats[n]:
                self.replicas.broadcast_parameters()
        self.replicas.mark_equal()

    def try_again(self) -> None:
        """Find out in the next update whether copies still make the originals': callbacks may have edited states."""
        self.repeats = [None if repeat else repeat for repeat in self.repeats]

    def _copy_again(self, n: int) -> None:
        originals = [original for original, *_ in self.replicas.parameters]
        for copies, mapping in zip(self.copies, self._mappings):
            vars(copies[n]).update(vars(copy_optimizer(self.originals[n], originals, list(mapping.values()))))


def copy_optimizer(
    optimizer: Optimizer, originals: Sequence[nn.Parameter], copies: Sequence[nn.Parameter]
) -> Optimizer:
    """A replica's own optimizer: the same class, settings and state, for the replica's parameters.

    Hooks stay with the original, and so does the `step` a scheduler puts on it.
    """
    own: dict[str, Any] = {name: value for name, value in vars(optimizer).items() if name != "step"}
    own.update({name: OrderedDict() for name in own if name.endswith("_hooks")})
    memo: dict[int, Any] = {id(original): parameter for original, parameter in zip(originals, copies)}
    replica = object.__new__(type(optimizer))
    vars(replica).update(copy.deepcopy(own, memo))
    for parameter, state in replica.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            # but a step counter on the CPU stays where the optimizer keeps it
            if isinstance(value, Tensor) and (value.shape == parameter.shape or not value.is_cpu):
                state[name] = value.to(parameter.device)
    return replica


def follow(optimizer: Optimizer, replica: Optimizer, mapping: dict[int, nn.Parameter]) -> None:
    """Give a replica's optimizer the settings of the original, and the parameters added to it since."""
    for i, group in enumerate(optimizer.param_groups):
        if i == len(replica.param_groups):  # unfrozen layers, say
            parameters = [mapping[id(parameter)] for parameter in group["params"]]
            replica.add_param_group({**group, "params": parameters})
        else:
            replica.param_groups[i].update({key: value for key, value in group.items() if key != "params"})


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
