"""Whether hooks of the user's may edit weights or gradients: an edit of `.data` leaves no mark."""

from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback

OURS = ("lightning.", "lightning_mgpu.")
IN_A_STEP = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward"),
)
BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step", "on_validation_batch_start")


class UsersHooks:
    """Looks for hooks of a module and its callbacks. Callbacks may be added while a Trainer trains."""

    def __init__(self) -> None:
        self._places: Any = None
        self._may_edit = False

    def may_edit(self, module: LightningModule) -> bool:
        """Whether a hook, in a step or between two, may edit weights or gradients."""
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        places = [*map(id, callbacks)], len(vars(module))
        if places != self._places:
            owners = [module, *(each for each in callbacks if _is_users(each))]
            self._places = places
            self._may_edit = any(_is_own(owner, hook) for owner in owners for hook in IN_A_STEP + BETWEEN_STEPS)
        return self._may_edit


def _is_users(callback: Callback) -> bool:
    return isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(OURS)


def _is_own(owner: LightningModule | Callback, hook: str) -> bool:
    """Whether a hook is the user's own: not Lightning's, nor one that a progress bar of theirs inherits."""
    method = getattr(owner, hook, None)
    base = getattr(LightningModule if isinstance(owner, LightningModule) else Callback, hook, None)
    if getattr(method, "__func__", method) is base:
        return False
    return isinstance(owner, LambdaCallback) or not str(getattr(method, "__module__", "")).startswith(OURS)
