"""Who may edit weights and gradients: hooks of users' modules and callbacks, where `.data` leaves no trace of it."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback

HOOKS_IN_STEP = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
)
HOOKS_ON_BATCHES = ("on_validation_batch_start", "on_test_batch_start", "on_predict_batch_start")
HOOKS_BETWEEN_EVALUATIONS = (
    *HOOKS_ON_BATCHES,
    *("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
HOOKS_BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step")


OURS = ("lightning.", "lightning_mgpu.")


class UsersHooks:
    """What users' hooks may do while a Trainer trains. Callbacks are added, and hooks set, in the middle of it.

    Attributes:
        own_backward: Whether the module has a `backward` of its own.
        edit_in_step: Whether a hook may edit weights or gradients in a step.
        edit: Whether one may in a step or between two.
        see_gradients: Whether one may look at gradients before an accumulation window ends.
    """

    def __init__(self) -> None:
        self.own_backward = self.edit_in_step = self.edit = self.see_gradients = False
        self._places: Any = None  # where they were looked for

    def look(self, module: LightningModule) -> None:
        """Look for them again if there are others than last time."""
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        places = [*map(id, callbacks)], len(vars(module))
        if places == self._places:
            return
        self._places = places
        self.own_backward = is_own("backward", module)
        self.edit_in_step = self.own_backward or _overrides(module, HOOKS_IN_STEP)
        self.edit = self.edit_in_step or _overrides(module, HOOKS_BETWEEN_STEPS)
        seeing = ("on_before_backward", "on_after_backward", *HOOKS_BETWEEN_STEPS)
        self.see_gradients = self.own_backward or _overrides(module, seeing)


def may_edit_batches(module: LightningModule) -> bool:
    """Whether a hook may edit a batch of evaluation in place."""
    return _overrides(module, HOOKS_ON_BATCHES)


def may_edit_between(module: LightningModule) -> bool:
    """Whether a hook may edit anything between two steps of evaluation."""
    return _overrides(module, HOOKS_BETWEEN_EVALUATIONS)


def is_own(hook: str, owner: LightningModule | LightningDataModule | Callback) -> bool:
    """Whether a hook is not Lightning's own; `is_overridden` takes one set on the instance for what it wraps."""
    base = next(base for base in (LightningModule, LightningDataModule, Callback) if isinstance(owner, base))
    method = getattr(owner, hook, None)
    return getattr(method, "__func__", method) is not getattr(base, hook, None)


def _overrides(module: LightningModule, hooks: Sequence[str]) -> bool:
    """Whether the module or a callback of the user's own, not of Lightning or of this package, has one of the hooks."""
    callbacks = [
        callback
        for callback in module.trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(OURS)
    ]
    if any(is_own(hook, module) for hook in hooks):
        return True
    own = (getattr(callback, hook) for callback in callbacks for hook in hooks if is_own(hook, callback))
    return any(not str(getattr(hook, "__module__", "")).startswith(OURS) for hook in own)  # a progress bar's, inherited
