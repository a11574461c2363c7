"""Copies of an optimizer for a replica's parameters: to make updates with, or to look at; and their settings."""

import copy
from collections import OrderedDict, UserDict
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgpu.strategies.batch.nesting import leaves
from lightning_mgpu.strategies.replicas.values import CONTAINERS, PLAIN

Settings = list[dict[str, Any]]
"""An optimizer's parameter groups, and after them its own numbers."""


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


def view_of(
    optimizer: Optimizer, settings: Settings, originals: Sequence[nn.Parameter], copies: Sequence[nn.Parameter]
) -> Optimizer:
    """An optimizer to look at: a replica's parameters in the place of the originals, and settings; the same states."""
    own = {id(original): copied for original, copied in zip(originals, copies)}
    device = next((copied.device for copied in copies), torch.device("cpu"))
    *groups, plain = settings
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer) | plain)
    view.param_groups = [
        {
            key: [own.get(id(p), p) for p in value] if key == "params" else _on(device, value)
            for key, value in group.items()
        }
        for group in groups
    ]
    view.state = _StatesSeen(device, {own.get(id(key), key): state for key, state in optimizer.state.items()})  # type: ignore[assignment]
    return view


class _StatesSeen(UserDict[Any, Any]):
    """The original's states by a replica's parameters: those that are looked at are copied to its device."""

    def __init__(self, device: torch.device, states: dict[Any, Any]) -> None:
        super().__init__(states)
        self.device = device

    def __getitem__(self, key: Any) -> Any:
        state = self.data.setdefault(key, {})
        if not isinstance(state, dict):
            return _on(self.device, state)
        seen = {name: _on(self.device, value, getattr(key, "shape", None)) for name, value in state.items()}
        return state if all(seen[name] is state[name] for name in state) else seen


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
