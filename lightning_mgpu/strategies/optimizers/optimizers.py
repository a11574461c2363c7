"""Every replica updates itself, as in the book: copies of the user's optimizers, which make the same update."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.compiled_step import compile_step, is_compiled, plan_of
from lightning_mgpu.strategies.optimizers.optimizer_copies import Settings, copy_optimizer, follow, settings_of
from lightning_mgpu.strategies.replicas.replicas import Replicas
from lightning_mgpu.strategies.threads.device_module import current_device
from lightning_mgpu.strategies.threads.generators import are_equal, generator_states, same_generator_states


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
            self.copy_again([n])
            self.replicas.broadcast_parameters()
            return
        plan = plan_of(self.originals[n])
        is_first = self.repeats[n] is None or (plan is not None and plan.is_new)
        with same_generator_states(self.replicas.devices) if is_first else contextlib.nullcontext():
            if n in self._begun:  # else the copies were made since
                self._follow(n, self._begun[n])
            try:
                for i, (copies, device) in enumerate(zip(self.copies, self.replicas.devices[1:])):
                    with current_device(device):
                        copies[n].step(closure=partial(self._close, i, n, closure), **self._arguments)
            except Exception as error:
                if not is_first:
                    raise
                self._give_up(n, error)
        if is_first:
            self.repeats[n] = self.repeats[n] is not False and self.replicas.agree()
            if not self.repeats[n]:
                self.replicas.broadcast_parameters()
        self.replicas.mark_equal()

    def _close(self, i: int, n: int, closure: Callable[[], Any]) -> Any:
        """The closure of copy i: the settings are then what they were at the end of the original's."""
        if n in self._closed:
            follow(self._closed[n], self.copies[i][n], self._mappings[i])
        return move_data_to_device(closure(), self.replicas.devices[i + 1])

    def _follow(self, n: int, settings: Settings) -> None:
        for copies, mapping in zip(self.copies, self._mappings):
            follow(settings, copies[n], mapping)

    def try_again(self) -> None:
        """Find out in the next update whether copies still make the originals': callbacks may have edited states."""
        self.repeats = [None if repeat else repeat for repeat in self.repeats]

    def _copy(self, n: int, mapping: dict[int, nn.Parameter]) -> Optimizer:
        originals = [original for original, *_ in self.replicas.parameters]
        try:
            copied = copy_optimizer(self.originals[n], originals, list(mapping.values()))
        except Exception as error:
            self._give_up(n, error)
            copied = copy_optimizer(self.originals[n], originals, list(mapping.values()), share=True)
        if is_compiled(self.originals[n]):
            compile_step(copied, like=self.originals[n])
        return copied

    def copy_again(self, numbers: Iterable[int]) -> None:
        """Give the copies of some optimizers the states of the originals."""
        for n, (copies, mapping) in product(numbers, zip(self.copies, self._mappings)):
            own = vars(self._copy(n, mapping))
            vars(copies[n]).update({name: own[name] for name in own if name != "step"})

    def _give_up(self, n: int, error: Exception) -> None:
        self.repeats[n] = False
        name, reason = type(self.originals[n]).__name__, f"{type(error).__name__}: {error}"
        rank_zero_info(f"Replicas are given the updates of {name}, which cannot be copied ({reason}).")


def check_parameters(optimizers: Sequence[Optimizer], replicas: Replicas, is_manual: bool, name: str) -> None:
    """Refuse optimizers that are none of torch's, and tensors that are trained, but not among the module's parameters.

    The former, which Lightning takes, have no hooks; of the latter every replica has a copy nobody would keep equal.

    Args:
        is_manual: Whether the module trains itself: without an optimizer, all that require gradients.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            own = type(optimizer).__name__
            raise MisconfigurationException(f"{own} is no torch.optim.Optimizer: derive it from that for {name}.")
    known = {id(original) for original, *_ in replicas.parameters}
    wrong = [
        (type(optimizer).__name__, parameter)
        for optimizer in optimizers
        for parameter in chain(*(group["params"] for group in optimizer.param_groups))
        if id(parameter) not in known
    ]
    if is_manual and all(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers):
        own = type(replicas.modules[0]).__name__
        wrong = [(own, tensor) for tensor in replicas.unregistered() if tensor.is_leaf and tensor.requires_grad]
    elif wrong:  # some are nowhere on the module
        copied = replicas.with_copies()
        wrong = [(owner, parameter) for owner, parameter in wrong if id(parameter) in copied]
    for owner, tensor in wrong:
        raise MisconfigurationException(
            f"{owner} has a tensor of shape {tuple(tensor.shape)} which is not among the module's parameters, so that "
            f"{name} cannot keep its copies equal: register it, as an nn.Parameter, in an nn.ParameterList or an "
            "nn.Module."
        )


def _first_state(optimizer: Optimizer) -> Any:
    """The first parameter's state, which is another object after `state.clear()` or `load_state_dict`."""
    return next((state for state in optimizer.state.values() if isinstance(state, dict)), None)


def _is_repeatable(optimizer: Optimizer) -> bool:
    """Not one that evaluates the loss several times, nor one with hooks of the user's, which copies do not have."""
    return not (
        isinstance(optimizer, LBFGS) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )
