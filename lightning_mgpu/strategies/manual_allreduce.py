"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

The book's functions, in the order of a step:

    get_params      replicas.py   copy the parameters to every device             `setup`
    split_batch     shards.py     cut the minibatch into one shard a device       `batch_to_device`
    train_batch     here          every device: loss and gradient of its shard,   `training_step`, `backward`
    allreduce       allreduce/    sum the gradients, give the sum to every device `reduce_gradients`
                    here          every replica updates itself                    `update_replicas`

The loss of a shard counts with its share of the samples, so that the sum of the gradients is the gradient of the mean
over the whole batch, however uneven the shards.

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=manual_allreduce
    python -m lightning_mgpu fit --trainer.strategy=ManualAllreduceStrategy \\
        --trainer.strategy.parallel_devices='[cpu, cpu, cpu]' --trainer.strategy.allreduce=my_module.my_allreduce
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.strategies.editing import HOOKS_BETWEEN_STEPS, HOOKS_IN_STEP, overrides
from lightning_mgpu.strategies.gradient_hooks import deferred_gradient_hooks, has_gradient_hooks
from lightning_mgpu.strategies.gradients import Gradients
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.losses import combine_outputs, find_loss, one_fork_at_a_time, without_graph
from lightning_mgpu.strategies.optimizers import ReplicaOptimizers
from lightning_mgpu.strategies.replicated import ReplicatedStrategy
from lightning_mgpu.strategies.shards import find_batch_size, gather


class ManualAllreduceStrategy(ReplicatedStrategy):
    """k replicas of the module on k devices of one process, kept equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one a device, in each of them (see `lightning_mgpu.allreduce`). A
            function of your own goes here, on the command line by its dotted path; it is tried on small tensors first.
        bucket_mb: Pack gradients into flat buckets of this many MB; 0 calls `allreduce` once a parameter, as the book.
        parallel_devices: The devices, `["cuda:0", "cpu"]` say; one may stand there several times. Left out: those of
            `Trainer(accelerator, devices)`.
        split: Relative shares of the batch, one a device, or `auto`: in proportion to each device's speed, timed in the
            first steps. Left out: even ones.

    Raises:
        ValueError: If `allreduce` does not compute the sum in place, with what each device got instead.
        MisconfigurationException: If started as several processes (torchrun, SLURM).
    """

    name = "manual_allreduce"

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        bucket_mb: float = 0.0,
        parallel_devices: list[str] | None = None,
        split: list[float] | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        if bucket_mb < 0:
            raise ValueError(f"bucket_mb={bucket_mb}: choose 0 (one call a parameter) or a size in MB.")
        super().__init__(parallel_devices, split, **kwargs)
        self.allreduce = allreduce
        self.bucket_bytes = int(bucket_mb * 2**20)
        self._lockstep: Lockstep | None = None  # in a step of manual optimization
        self._num_closures = 0
        self._stepped: bool | None = None  # whether the optimizer has made an update, in `optimizer_step`
        self._loss: Any = None  # what the last closure returned
        self._edits_in_step = self._shows_gradients = False  # whether users' hooks edit weights, or look at gradients
        self._handles: list[Any] = []

    # get_params: copy the parameters to every device

    @override
    def setup(self, trainer: Trainer) -> None:
        check_allreduce(self.allreduce, self.devices)
        super().setup(trainer)

    @override
    def on_train_start(self) -> None:
        """Everything is restored by now, optimizers too: give every replica its own."""
        self._remove_hooks()  # the learning-rate finder starts training twice
        self.gradients = Gradients(self._replicas.parameters)
        self._replicas.broadcast(norms=True)
        self._replicas.mark_step()
        if len(self.devices) == 1:
            return
        self._own: ReplicaOptimizers | None = ReplicaOptimizers(self._replicas, self._optimizers)
        for n, optimizer in enumerate(self._optimizers):
            self._handles.append(optimizer.register_step_post_hook(lambda *_, n=n: self._on_step(n)))
        self._wrap_copies(self._own.copies)
        self._edits_in_step = overrides(self.original, HOOKS_IN_STEP)
        self._edits = self._edits_in_step or overrides(self.original, HOOKS_BETWEEN_STEPS)
        self._shows_gradients = overrides(self.original, ("on_after_backward",))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._num_closures = 0
        self._is_stale |= batch_idx == 0  # hooks around an epoch

    # train_batch: loss and gradient of every shard

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_stale |= self._num_closures > 0  # an optimizer tries other weights
        self._num_closures += 1
        if len(self.devices) == 1 or find_batch_size(batch) is None:
            return super().training_step(batch, *args, **kwargs)
        sizes = self._sizes(batch)
        weights = {i: size / sum(sizes) for i, size in enumerate(sizes) if size}
        if not self.original.automatic_optimization:
            assert self._own is not None
            self._own.follow()
            self._lockstep = Lockstep(self.team, weights, self._is_joint)
        try:
            with self.precision_plugin.train_step_context():
                active, sizes, outputs = self.run_step("training_step", batch, *args, **kwargs)
        finally:
            self._lockstep = None
        self._replicas.mark_step(trained=True)
        if self._is_stale or len(active) < len(self.devices):  # a replica without samples has missed something
            self._replicas.broadcast_parameters()
            self._is_stale = True  # buffers: not now, the backward pass may need them
        if not self.original.automatic_optimization:
            return gather(without_graph(outputs), sizes, self.root_device)
        if all(find_loss(output) is None for output in outputs):  # a step may return None to be skipped
            if not self._is_blocked and not self.gradients.are_reduced:  # the window's last batch: its others count
                self.reduce_gradients()
            return None
        return combine_outputs(outputs, sizes, active, None if self._is_joint else self._backward_in_threads)

    @property
    def _is_joint(self) -> bool:
        """Whether one backward pass runs for all: autograd drives GPUs side by side by itself, but not CPU replicas.

        With synchronised BatchNorm the replicas' graphs are one.
        """
        return self._syncs_batch_norm or any(device.type != "cpu" for device in self.devices)

    def _backward_in_threads(self, losses: dict[int, Tensor], gradients: dict[int, Tensor], keep_graph: bool) -> None:
        """The backward pass of every replica's loss from its gradient, in the replica's thread."""

        def backward(i: int) -> None:
            if losses[i].requires_grad:
                losses[i].backward(gradients[i], retain_graph=keep_graph, create_graph=torch.is_grad_enabled())

        with one_fork_at_a_time():
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
        if self._edits_in_step:
            self._replicas.broadcast()
        with ExitStack() as stack:
            if len(self.devices) > 1:
                stack.enter_context(deferred_gradient_hooks(self.original.parameters()))
            self.precision_plugin.backward(loss, self.original, optimizer, *args, **kwargs)
            if not is_blocked:
                self.reduce_gradients()
        if not is_blocked:
            self.gradients.mark()
        loss = self.precision_plugin.post_backward(loss, self.original)
        self.post_backward(loss)
        return loss

    @property
    def _is_blocked(self) -> bool:
        """Whether gradients are reduced at the end of an accumulation window: not where somebody looks at them."""
        return (
            self._blocked and not self._shows_gradients and not any(map(has_gradient_hooks, self.original.parameters()))
        )

    # allreduce: sum the gradients, give the sum to every device

    def reduce_gradients(self) -> None:
        """Leave the sum of the replicas' gradients in every one of them, by `allreduce`."""
        if len(self.devices) > 1:
            self.gradients.reduce(self.allreduce, self.bucket_bytes)

    # Every replica updates itself

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._num_closures = 0

        def evaluate(closure: Callable[[], Any]) -> Any:
            self._loss = closure()
            return self._loss

        def run(closure: Callable[[], Any]) -> Any:
            """Step the original's optimizer, and the replicas' if it did: a GradScaler may skip it."""
            self._stepped = False
            try:
                result = step(closure=partial(evaluate, closure))
            finally:
                stepped, self._stepped = self._stepped, None
            if stepped:
                self.update_replicas(n)
            return result

        def before_closure() -> None:
            if self._num_closures or self._replicas.is_edited():
                self._replicas.broadcast()
            self._num_closures += 1

        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        if len(self.devices) == 1:
            return step(closure=closure)
        n = next(n for n, own in enumerate(self.optimizers) if own is optimizer)
        if self._lockstep is None or not self.team.is_running:
            return run(closure)
        return self._lockstep.step(n, run, closure, before_closure)

    def _on_step(self, n: int) -> None:
        """Called by torch when the original's optimizer `n` has made an update, also one that is part of another."""
        assert self._own is not None
        is_ours = self._stepped is not None
        if not is_ours or getattr(self._optimizers[n], "grad_scale", None) is not None:
            self._own.repeats[n] = False  # a GradScaler leaves unscaling to some optimizers
        if is_ours:
            self._stepped = True
        else:  # the user's code steps torch's optimizer, in every replica
            self._is_stale = True

    def update_replicas(self, n: int) -> None:
        """The original was updated by optimizer `n`: every other replica makes its own update, from its gradient."""
        assert self._own is not None
        if self._lockstep is not None and self._lockstep.num_backwards == 0 and self.gradients.are_others():
            raise RuntimeError("training_step must call self.manual_backward(loss), not loss.backward().")
        self.gradients.give(everything=getattr(self.precision_plugin, "scaler", None) is not None)  # untraced unscaling
        can_repeat = self._num_closures <= 1 and not self._edits_in_step
        self._own.update(n, lambda: self._loss, can_repeat)

    @override
    def teardown(self) -> None:
        self._remove_hooks()
        self._loss, self._own = None, None
        self._wrap_copies([])
        self.gradients = Gradients([])
        super().teardown()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
