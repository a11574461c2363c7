"""`train_batch` of the book: loss and gradient of every shard, on its device (d2l.ai, 'Training on Multiple GPUs').

The loss of a shard counts with its share of the samples, so that the sum of the gradients is the gradient of the mean
over the whole batch, however uneven the shards.

Where the gradients meet, and who makes the update, is what strategies differ in: `manual_allreduce.py` and `dp.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.batch.gather import gather
from lightning_mgpu.strategies.batch.nesting import leaves
from lightning_mgpu.strategies.editing import UsersHooks
from lightning_mgpu.strategies.gradients.gradient_hooks import deferred_gradient_hooks, has_gradient_hooks
from lightning_mgpu.strategies.gradients.gradients import Gradients
from lightning_mgpu.strategies.gradients.losses import (
    InputsOfAll,
    combine_outputs,
    find_loss,
    find_refused,
    one_fork_at_a_time,
    watch_backward,
    without_graph,
)
from lightning_mgpu.strategies.optimizers.lockstep import Lockstep
from lightning_mgpu.strategies.optimizers.optimizer_copies import settings_of
from lightning_mgpu.strategies.optimizers.optimizers import ReplicaOptimizers, check_parameters
from lightning_mgpu.strategies.own_state import OwnState
from lightning_mgpu.strategies.replicated import ReplicatedStrategy


class TrainBatchStrategy(OwnState, ReplicatedStrategy):
    """Trains k replicas of the module side by side, each on its shard of the batch.

    Subclasses implement `reduce_gradients` and `update_replicas`, and say with `replicas_update` whether every replica
    has optimizers that count, or only the original has.
    """

    replicas_update: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients = Gradients([])
        self._own: ReplicaOptimizers | None = None
        self._attached: list[Optimizer] = []  # the optimizers it was made of
        self._is_manual = False  # how they were used then
        self._trains = False  # between the start of training and the teardown
        self._lockstep = None
        self._shares_graph = False  # the shards of this step's batch have one
        self._num_closures = 0
        self._missed: set[int] = set()  # optimizers whose copies lack an update that the user's code has made
        self._stepped: bool | None = None  # whether the optimizer has made an update, in `optimizer_step`
        self._loss: Any = None  # what the last closure returned
        self._handles: list[Any] = []

    def reduce_gradients(self) -> None:
        """Add the replicas' gradients up: the original's are those of the whole batch when this returns."""
        raise NotImplementedError

    def exchange_gradients(self) -> None:
        """Call `reduce_gradients`.

        Raises:
            MisconfigurationException: If it does nothing: the original would train on the first shard alone.
        """
        self.reduce_gradients()
        if len(self.devices) > 1 and not self.gradients.are_reduced:
            raise MisconfigurationException(
                f"{type(self).__name__}.reduce_gradients has added nothing up: call self.gradients.reduce(...) in it. "
                "Replicas are equal after every step; ones that drift apart for a while are no replicas here."
            )

    def update_replicas(self, n: int) -> None:
        """The original was updated by optimizer `n`: see to the other replicas."""
        raise NotImplementedError

    @override
    def on_train_start(self) -> None:
        """Everything is restored by now, optimizers too."""
        self._trains = True
        if self._replicas.have_objects_of_originals():
            super().renew_replicas()
        self._attach()
        self._look_for_hooks()

    def _look_for_hooks(self) -> None:
        if len(self.devices) > 1:
            self.hooks.look(self.original)

    def _attach(self) -> None:
        """What is made of the replicas for training: their gradients and optimizers."""
        self._remove_hooks()  # again: the learning-rate finder starts training twice, layers are replaced
        self._attached, self._is_manual = self._stepped_optimizers, not self.original.automatic_optimization
        if len(self.devices) > 1:
            check_parameters(self._attached, self._replicas, self._is_manual, self.name)
        self.gradients = Gradients(self._replicas.parameters)
        self._replicas.broadcast(norms=True)
        self._replicas.give_tensors()
        self._replicas.mark_step()
        if len(self.devices) == 1:
            return
        if self.replicas_update or self._is_manual:
            self._own = ReplicaOptimizers(self._replicas, self._attached, self._give_gradients)
            self._wrap_copies(self._own.copies if self._is_manual else [])
        for n, optimizer in enumerate(self._attached):
            self._handles.append(optimizer.register_step_post_hook(lambda *_, n=n: self._on_step(n)))
            if self._own is not None:
                self._handles.append(optimizer.register_step_pre_hook(partial(self._own.watch, n)))

    def _end_window(self) -> None:
        """Add up what the replicas have collected of an accumulation window, before its end."""
        if len(self.devices) > 1 and not self.gradients.are_reduced:
            self.exchange_gradients()

    @override
    def synchronize(self) -> None:
        super().synchronize()
        self._end_window()  # hooks may look at gradients, and after the run anybody

    @override
    def renew_replicas(self) -> None:
        if not self._trains:
            super().renew_replicas()
            return
        self._end_window()
        super().renew_replicas()
        self._attach()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._num_closures = 0
        self._look_for_hooks()
        self._is_stale |= batch_idx == 0  # hooks around an epoch
        is_manual = not self.original.automatic_optimization
        if is_manual != self._is_manual or [*map(id, self._attached)] != [*map(id, self._stepped_optimizers)]:
            self.renew_replicas()  # they were set up again
        if self._own is not None and (batch_idx == 0 or self._is_evaluated or (self.hooks.edit and is_manual)):
            self._own.try_again()  # a hook may have edited a state

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_stale |= self._num_closures > 0  # an optimizer tries other weights
        self._num_closures += 1
        if not self.is_split or self.find_batch_size(batch) is None:
            if self.is_split and isinstance(batch, Iterator):
                rank_zero_warn(
                    f"training_step takes whole batches from dataloader_iter: {self.devices[0]} works alone."
                )
            return super().training_step(batch, *args, **kwargs)
        if self._replicas.has_new_structure():
            self.renew_replicas()
        self._shares_graph = any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in leaves(batch))
        meetings: AbstractContextManager = nullcontext()
        if not self.original.automatic_optimization:
            assert self._own is not None
            self._own.copy_again(self._missed)
            self._missed.clear()
            self._own.follow()
            samples = {i: size for i, size in enumerate(self._sizes(batch)) if size}
            self._lockstep = Lockstep(self.team, samples, self._is_joint)
            meetings = self._stepped_together(self._lockstep, self._own.follow)
            for own in self._wrapped:
                for wrapper in own:
                    wrapper._on_after_step = self._lockstep.after_step(wrapper._on_after_step)
        else:
            self._settings = [settings_of(optimizer) for optimizer in self._attached]
        try:
            with self.precision_plugin.train_step_context(), meetings:
                active, sizes, outputs = self.run_step("training_step", batch, *args, **kwargs)
        finally:
            self._lockstep, self._settings = None, []
            for wrapper in chain(*self._wrapped[1:]):  # the original's are the Trainer's affair
                wrapper._on_after_step = do_nothing_closure
        if self._is_stale or len(active) < len(self.devices):  # a replica without samples has missed something
            self._replicas.broadcast_parameters()
            self._is_stale = True  # buffers: not now, the backward pass may need them
        if not self.original.automatic_optimization:
            return gather(without_graph(outputs), sizes, self.root_device)
        if (refused := find_refused(outputs)) is not None:
            return refused  # Lightning says why
        if all(find_loss(output) is None for output in outputs):  # a step may return None to be skipped
            if not self._is_blocked and not self.gradients.are_reduced:  # the window's last batch: its others count
                self.exchange_gradients()
            return None
        backward = None if self._is_joint else self._backward_in_threads
        return combine_outputs(outputs, sizes, active, backward, self.root_device)

    @property
    def _is_joint(self) -> bool:
        """Whether one backward pass runs for all: autograd drives GPUs side by side by itself, but not CPU replicas.

        The replicas' graphs are one with synchronised BatchNorm, and where `on_after_batch_transfer` has computed the
        batch with layers; a `backward` of the user's own looks at the gradients when it is over.
        """
        is_on_cpus = all(device.type == "cpu" for device in self.devices)
        return self._syncs_batch_norm or self._shares_graph or self.hooks.own_backward or not is_on_cpus

    def _backward_in_threads(self, losses: dict[int, Tensor], gradients: dict[int, Tensor], keep_graph: bool) -> None:
        """The backward pass of every replica's loss from its gradient, in the replica's thread."""

        def backward(i: int) -> None:
            if losses[i].requires_grad:
                losses[i].backward(gradients[i], retain_graph=keep_graph, create_graph=torch.is_grad_enabled())

        self._run("backward", backward, list(losses))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of all shards and reduce them, before any hook or callback looks at them."""
        if self._lockstep is not None and self.team.is_running:
            module = self._replicas.modules[self.team.index]
            return self._lockstep.backward(self, module, closure_loss, optimizer, *args, **kwargs)
        is_blocked = self._is_blocked
        self.gradients.begin()
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.original)
        if self.hooks.edit_in_step:
            self._replicas.broadcast_parameters()  # not buffers, which the backward pass may need as they are
        with ExitStack() as stack:
            if len(self.devices) > 1:
                stack.enter_context(deferred_gradient_hooks(self.gradients.parameters))
            self.run_backward(loss, optimizer, *args, **kwargs)
            if not is_blocked and not self.gradients.are_reduced:
                self.exchange_gradients()
        if not is_blocked:
            self.gradients.mark()
        loss = self.precision_plugin.post_backward(loss, self.original)
        self.post_backward(loss)
        return loss

    def run_backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        """Call the module's `backward`; a user's own finds the reduced gradients after `loss.backward()`."""
        if self.hooks.own_backward:
            loss = watch_backward(loss, self.gradients.begin, self.exchange_gradients)
        with one_fork_at_a_time(), InputsOfAll(self.gradients.parameters) if self.hooks.own_backward else nullcontext():
            self.precision_plugin.backward(loss, self.original, optimizer, *args, **kwargs)

    @property
    def _is_blocked(self) -> bool:
        """Whether gradients are reduced at the end of an accumulation window: not where somebody looks at them."""
        return (
            self._blocked
            and not self.hooks.see_gradients
            and not any(map(has_gradient_hooks, self.original.parameters()))
        )

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._num_closures = 0

        def evaluate(closure: Callable[[], Any]) -> Any:
            self._loss = closure()
            return self._loss

        def run(closure: Callable[[], Any]) -> Any:
            """Step the original's optimizer, and the replicas' if it did: a GradScaler may skip it."""
            self._stepped = False
            if self._own is not None:
                self._own.begin(n)
            try:
                result = step(closure=partial(evaluate, closure))
            finally:
                stepped, self._stepped = self._stepped, None
            if stepped:
                if self._lockstep is not None and self._lockstep.num_backwards == 0 and self.gradients.are_others():
                    raise RuntimeError("training_step must call self.manual_backward(loss), not loss.backward().")
                self.update_replicas(n)
            return result

        def before_closure() -> None:
            if self._num_closures or self._replicas.is_edited():
                self._replicas.broadcast()
            self._num_closures += 1

        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        if len(self.devices) == 1:
            return step(closure=closure)
        copies = [wrapper._optimizer for wrapper in self._lightning_optimizers]
        known = copies if self._index else self._stepped_optimizers
        n = next((n for n, own in enumerate(known) if own is optimizer), -1)
        if n < 0:
            raise MisconfigurationException(
                f"{type(optimizer).__name__} is not among the optimizers of configure_optimizers: {self.name} has no "
                "copies of it for the replicas."
            )
        if self._lockstep is None or not self.team.is_running:
            return run(closure)
        return self._lockstep.step(n, run, closure, before_closure)

    def _give_gradients(self) -> None:
        """Give the replicas what hooks and clipping have made of the reduced gradients, before the update."""
        if self._stepped is not None and self.replicas_update:
            self.gradients.give(
                everything=getattr(self.precision_plugin, "scaler", None) is not None
            )  # it leaves no trace

    def _on_step(self, n: int) -> None:
        """Called by torch when the original's optimizer `n` has made an update, also one that is part of another."""
        is_ours = self._stepped is not None
        if self._own is not None and (not is_ours or getattr(self._attached[n], "grad_scale", None) is not None):
            self._own.repeats[n] = False  # a GradScaler leaves unscaling to some optimizers
        if is_ours:
            self._stepped = True
        else:  # the user's code steps torch's optimizer, in every replica that has samples
            self._is_stale = True
            if self._lockstep is None or len(self._lockstep.sizes) < len(self.devices):
                self._missed.add(n)

    @override
    def teardown(self) -> None:
        self._remove_hooks()
        self._trains = False
        self._loss, self._own, self._attached, self._missed = None, None, [], set()
        self.hooks = UsersHooks()
        self._wrapped[1:], self._seen_by = [], {}
        self.gradients = Gradients([])
        super().teardown()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
