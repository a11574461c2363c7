"""Every replica makes its own update, as in the book, where nothing else had a hand in it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.strategies.gradients import are_equal
from lightning_mgpu.strategies.one_process import current_device
from lightning_mgpu.strategies.replicas import Replicas

State = defaultdict[Any, Any]


class Updates:
    """The replicas' own updates: their parameters and states are put into the user's optimizer, which steps again."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._states: dict[Optimizer, list[State]] = {}  # by replica; missing: the first one's is copied
        self._verified: set[Optimizer] = set()  # whose update was compared in this epoch
        self._refused: set[Optimizer] = set()  # and was another one

    def start_anew(self) -> None:
        """Somebody may have edited states, or an epoch begins: copy them, and compare the next update."""
        self._states.clear()
        self._verified.clear()
        self._refused.clear()

    def can_repeat(self, optimizer: Optimizer) -> bool:
        """Whether replicas can make this optimizer's update themselves: one of torch's, as it is, on like devices."""
        step = vars(optimizer).get("step")  # a scheduler puts one there, which calls the class's
        known = {id(tensors[0]) for tensors in self.replicas.parameters}  # but those of scripted layers
        return (
            type(optimizer).__module__.startswith("torch.optim")
            and not isinstance(optimizer, LBFGS)
            and (step is None or getattr(step, "__wrapped__", None) is type(optimizer).step)
            and not optimizer._optimizer_step_pre_hooks  # private names of torch
            and not optimizer._optimizer_step_post_hooks
            and optimizer not in self._refused
            and all(id(param) in known for group in optimizer.param_groups for param in group["params"])
            and len({device.type for device in self.replicas.devices}) == 1
        )

    def prepare(self, optimizer: Optimizer) -> None:
        """The first replica's update follows: note the state that it begins with, if the others have none."""
        if optimizer not in self._states:
            self._states[optimizer] = [self._state_of(optimizer, i) for i in range(len(self.replicas.devices))]

    def _state_of(self, optimizer: Optimizer, i: int) -> State:
        own: State = defaultdict(dict)
        if i and self._is_updated(i):
            copies = {id(tensors[0]): tensors[i] for tensors in self.replicas.parameters}
            for param, state in optimizer.state.items():
                device = self.replicas.devices[i] if not _is_on_cpu(state) else torch.device("cpu")
                own[copies.get(id(param), param)] = apply_to_collection(
                    state, Tensor, lambda t, to=device: t.to(to if t.ndim else t.device, copy=True)
                )
        return own

    def _is_updated(self, i: int) -> bool:
        """Whether replica i has parameters in memory of their own."""
        return not (self.replicas.share and self.replicas.devices[i] in self.replicas.devices[:i])

    def repeat(self, optimizer: Optimizer) -> bool:
        """Let the other replicas make the update that the first one has made.

        Returns:
            Whether they made it. If their first one in an epoch differs, the first replica's parameters are copied.
        """
        groups, state, states = optimizer.param_groups, optimizer.state, self._states[optimizer]
        params = [group["params"] for group in groups]
        copies = {id(tensors[0]): tensors for tensors in self.replicas.parameters}
        try:
            for i, device in enumerate(self.replicas.devices[1:], start=1):
                if self._is_updated(i):
                    for group, own in zip(groups, params):
                        group["params"] = [copies[id(param)][i] for param in own]
                    optimizer.state = states[i]
                    with current_device(device):
                        type(optimizer).step(optimizer)
        finally:
            optimizer.state = state
            for group, own in zip(groups, params):
                group["params"] = own
        if optimizer not in self._verified:
            self._verified.add(optimizer)
            if not all(are_equal(first, other) for first, *others in copies.values() for other in others):
                self.forget(optimizer)
                self._refused.add(optimizer)
                return False
        for each in self.replicas.copies.values():
            each.mark()
        return True

    def forget(self, optimizer: Optimizer) -> None:
        """The replicas have not made an update: their states lag behind."""
        self._states.pop(optimizer, None)


def check_optimizers(optimizers: Sequence[Any], name: str) -> None:
    """Refuse optimizers that are not torch's, which Lightning takes.

    Raises:
        MisconfigurationException: One line that names the class.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            own = type(optimizer).__name__
            raise MisconfigurationException(f"{own} is no torch.optim.Optimizer: derive it from that for {name}.")


def _is_on_cpu(state: Any) -> bool:
    return all(t.is_cpu for t in state.values() if isinstance(t, Tensor)) if isinstance(state, dict) else True
