"""Every replica makes its own update, as in the book, where nothing else has a hand in it.

In its turn a replica finds its own parameters in the optimizers. For its update the user's optimizer steps again in its
turn, with a state of the replica's own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.strategies.one_process import current_device
from lightning_mgpu.strategies.replicas import Replicas, are_equal

OURS = ("lightning.", "lightning_mgpu.")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # private; the former precede the closure
MAY_EDIT = {
    "training_step": (
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "backward"),
        *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
        *("on_train_batch_start", "on_train_batch_end"),
    ),
    "validation_step": ("on_validation_batch_start", "on_validation_batch_end"),
    "test_step": ("on_test_batch_start", "on_test_batch_end"),
    "predict_step": ("on_predict_batch_start", "on_predict_batch_end"),
}


class Updates:
    """What the optimizers are in a replica's turn, and the replicas' own updates."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.optimizers: Sequence[Optimizer] = ()  # of the training step that runs
        self._settings: list[dict[str, Any]] = []  # of the optimizers' groups, when the first replica's turn began
        self._states: dict[Optimizer, list[Any]] = {}  # by replica
        self._repeated: set[Optimizer] = set()  # every replica steps it, and keeps its own state
        self._are_equal: dict[Optimizer, bool] = {}  # the replicas, after the first such step of an epoch

    def find_hooks(self, step: str, optimizers: Sequence[Optimizer]) -> bool:
        """Whether weights or gradients may be edited unseen: by a hook of the user's, or by a GradScaler."""
        module = self.replicas.module
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        hooks: list[Any] = [getattr(module.trainer.precision_plugin, "scaler", None)]
        hooks += [getattr(optimizer, name, None) for optimizer in optimizers for name in STEP_HOOKS]
        return any(hooks) or any(_is_users(hook, owner) for owner in [module, *callbacks] for hook in MAY_EDIT[step])

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """A step begins, which trains with these optimizers. Replicas have copies of the states: it may edit them."""
        self.optimizers = optimizers
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer) or hasattr(type(optimizer), "state"):  # Lightning takes others, too
                own = type(optimizer).__name__
                raise MisconfigurationException(f"{own} is no torch.optim.Optimizer with a state: derive it from that.")
            if optimizer not in self._repeated:
                self._states[optimizer] = self._copies_of_state(optimizer)

    @contextmanager
    def turn(self, i: int, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Let optimizers have replica i's parameters and states inside the block. Replicas begin with like settings."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if i == 0:
            self._settings = [dict(group) for group in groups]
            yield
            return
        before, states = [dict(group) for group in groups], [optimizer.state for optimizer in optimizers]
        for group, settings in zip(groups, self._settings):
            group.update(settings)
            group["params"] = [self.replicas.copy_of(param, i) for param in settings["params"]]
        for optimizer in optimizers:
            optimizer.state = self._states[optimizer][i]
        try:
            yield
        finally:
            for group, settings in zip(groups, before):
                group.clear()
                group.update(settings)
            for optimizer, state in zip(optimizers, states):
                self._states[optimizer][i], optimizer.state = optimizer.state, state

    def repeat(self, optimizer: Optimizer) -> bool:
        """Let the other replicas make the update that the first one has made.

        Returns:
            Whether they have made it, and hold the first one's bits. The first one in an epoch is compared.
        """
        if optimizer not in self._states or not self._is_repeatable(optimizer):
            self._repeated.discard(optimizer)  # its states lag behind from now on
            return False
        self._repeated.add(optimizer)
        self._settings = [dict(group) for group in optimizer.param_groups]
        for i, device in enumerate(self.replicas.devices[1:], start=1):
            with self.turn(i, [optimizer]), current_device(device):
                type(optimizer).step(optimizer)
        if optimizer not in self._are_equal:
            parameters = self.replicas.parameters
            self._are_equal[optimizer] = all(are_equal(first, each) for first, *others in parameters for each in others)
        if self._are_equal[optimizer]:
            self.replicas.remember()
        return self._are_equal[optimizer]

    def start_anew(self) -> None:
        """Somebody may have edited states, or an epoch begins: copy them, and compare again."""
        self._repeated.clear()
        self._are_equal.clear()

    def _is_repeatable(self, optimizer: Optimizer) -> bool:
        """Whether replicas can make this update themselves: an optimizer of torch's, as it is, on like devices."""
        module, copies = self.replicas.module, self.replicas.copies_of  # not of scripted layers' parameters
        step = vars(optimizer).get("step")  # a scheduler puts one there, which calls the class's
        return (
            module.automatic_optimization
            and not self.replicas.may_be_edited
            and type(optimizer).__module__.startswith("torch.optim")
            and not isinstance(optimizer, LBFGS)
            and (step is None or getattr(step, "__wrapped__", None) is type(optimizer).step)
            and self._are_equal.get(optimizer, True)
            and all(id(param) in copies for group in optimizer.param_groups for param in group["params"])
            and len({device.type for device in self.replicas.devices}) == 1
        )

    def _copies_of_state(self, optimizer: Optimizer) -> list[Any]:
        """The optimizer's state for every replica, by its parameters. A counter on the CPU stays there."""
        home, states = self.replicas.devices[0], []
        for i, device in enumerate(self.replicas.devices):
            copied: defaultdict[Any, Any] = defaultdict(dict)
            move = lambda t, to=device: t.to(to if t.device == home else t.device, copy=True)  # noqa: E731
            for param, state in list(optimizer.state.items()) if i else ():
                copied[self.replicas.copy_of(param, i)] = apply_to_collection(state, Tensor, move)
            states.append(copied)
        return states


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
