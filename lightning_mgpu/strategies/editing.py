"""Who may edit weights and gradients: hooks of users' modules and callbacks, where `.data` leaves no trace of it."""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LambdaCallback

HOOKS_IN_STEP = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
)
HOOKS_BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "lr_scheduler_step")


def overrides(module: LightningModule, hooks: Sequence[str]) -> bool:
    """Whether the module or a callback of the user's own, not of Lightning or of this package, has one of the hooks."""
    callbacks = [
        callback
        for callback in module.trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, LambdaCallback)
        or not type(callback).__module__.startswith(("lightning.", "lightning_mgpu."))
    ]
    return any(is_own(hook, owner) for hook in hooks for owner in (module, *callbacks))


def is_own(hook: str, owner: LightningModule | LightningDataModule | Callback) -> bool:
    """Whether a hook is not Lightning's own; `is_overridden` takes one set on the instance for what it wraps."""
    base = next(base for base in (LightningModule, LightningDataModule, Callback) if isinstance(owner, base))
    method = getattr(owner, hook, None)
    return getattr(method, "__func__", method) is not getattr(base, hook, None)
