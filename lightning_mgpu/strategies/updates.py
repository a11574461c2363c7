"""Every replica makes its own update, as in the book, where nothing else had a hand in it. This file decides where."""

from collections import defaultdict
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.strategies.gradients import are_equal
from lightning_mgpu.strategies.one_process import current_device
from lightning_mgpu.strategies.replicas import Replicas

OURS = ("lightning.", "lightning_mgpu.")
MAY_EDIT = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "backward"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start"),
)


class Updates:
    """The replicas' own updates: their parameters and states are put into the user's optimizer, which steps again."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._states: dict[Optimizer, list[Any]] = {}  # by replica; missing: the first one's is copied
        self._verified: set[Optimizer] = set()  # whose update was compared in this epoch
        self._refused: set[Optimizer] = set()  # and was another one
        self._places: Any = None  # where hooks were looked for
        self._may_edit = False

    def may_edit(self) -> bool:
        """Whether a hook of the user's, in a step or between two, may edit weights or gradients without a mark."""
        module = self.replicas.module
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        if (places := ([*map(id, callbacks)], len(vars(module)))) != self._places:
            self._places = places
            self._may_edit = any(_is_users(hook, owner) for owner in [module, *callbacks] for hook in MAY_EDIT)
        return self._may_edit

    def can_repeat(self, optimizer: Optimizer) -> bool:
        """Whether replicas can make this optimizer's update themselves: one of torch's, as it is, on like devices."""
        known = {id(tensors[0]) for tensors in self.replicas.parameters}  # not those of scripted layers
        step = vars(optimizer).get("step")  # a scheduler puts one there, which calls the class's
        return (
            type(optimizer).__module__.startswith("torch.optim")
            and not isinstance(optimizer, LBFGS)
            and (step is None or getattr(step, "__wrapped__", None) is type(optimizer).step)
            and not optimizer._optimizer_step_pre_hooks  # private names of torch
            and not optimizer._optimizer_step_post_hooks
            and optimizer not in self._refused
            and all(id(param) in known for group in optimizer.param_groups for param in group["params"])
            and len({device.type for device in self.replicas.devices}) == 1
            and not self.may_edit()
        )

    def start_anew(self) -> None:
        """Somebody may have edited states, or an epoch begins: copy them, and compare the next update."""
        for known in (self._states, self._verified, self._refused):
            known.clear()

    def forget(self, optimizer: Optimizer) -> None:
        """The replicas have not made an update: their states lag behind."""
        self._states.pop(optimizer, None)

    def prepare(self, optimizer: Optimizer) -> None:
        """The first replica's update follows: copy the state that it begins with, if the others have none."""
        if optimizer not in self._states:
            self._states[optimizer] = [self._state_of(optimizer, i) for i in range(len(self.replicas.devices))]

    def _state_of(self, optimizer: Optimizer, i: int) -> Any:
        own: defaultdict[Any, Any] = defaultdict(dict)
        copies = {id(tensors[0]): tensors[i] for tensors in self.replicas.parameters}
        home, device = self.replicas.devices[0], self.replicas.devices[i]
        if i and self.replicas.has_own_parameters(i):
            for param, state in optimizer.state.items():  # a counter on the CPU stays there
                move = lambda t: t.to(device if t.device == home else t.device, copy=True)  # noqa: E731
                own[copies[id(param)]] = apply_to_collection(state, Tensor, move)
        return own

    def repeat(self, optimizer: Optimizer) -> bool:
        """Let the other replicas make the update that the first one has made.

        Returns:
            Whether they made it. The first one in an epoch is compared.
        """
        groups, state = optimizer.param_groups, optimizer.state
        params = [group["params"] for group in groups]
        copies = {id(tensors[0]): tensors for tensors in self.replicas.parameters}
        try:
            for i, device in enumerate(self.replicas.devices[1:], start=1):
                if self.replicas.has_own_parameters(i):
                    for group, own in zip(groups, params):
                        group["params"] = [copies[id(param)][i] for param in own]
                    optimizer.state = self._states[optimizer][i]
                    with current_device(device):
                        type(optimizer).step(optimizer)
        finally:
            optimizer.state = state
            for group, own in zip(groups, params):
                group["params"] = own
        if optimizer not in self._verified:
            self._verified.add(optimizer)
            if not all(are_equal(first, other) for first, *others in copies.values() for other in others):
                self._refused.add(optimizer)
                return False
        for each in self.replicas.copies.values():
            each.mark()
        return True


def _is_users(hook: str, owner: Any) -> bool:
    """Whether a module or a callback has a hook of the user's own: not Lightning's, nor one of this package."""
    base = LightningModule if isinstance(owner, LightningModule) else Callback
    method = getattr(owner, hook, None)
    if getattr(method, "__func__", method) is getattr(base, hook, None):
        return False
    if isinstance(owner, LambdaCallback):
        return True
    is_ours = isinstance(owner, Callback) and type(owner).__module__.startswith(OURS)
    return not is_ours and not str(getattr(method, "__module__", "")).startswith(OURS)
