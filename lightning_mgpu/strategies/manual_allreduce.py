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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.strategies.auto_split import AutoSplit
from lightning_mgpu.strategies.buckets import reduce_in_buckets
from lightning_mgpu.strategies.gradient_hooks import deferred_gradient_hooks
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.losses import combine_losses
from lightning_mgpu.strategies.recording import Recorder
from lightning_mgpu.strategies.replicas import Replicas, copy_optimizer, follow
from lightning_mgpu.strategies.shards import find_batch_size, gather
from lightning_mgpu.strategies.single_process import SingleProcessStrategy
from lightning_mgpu.strategies.sync_batchnorm import synchronize_batch_norm

# Hooks between two steps, in which users' callbacks and modules may edit weights through `.data`, which leaves no trace
EDITING_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step")


class ManualAllreduceStrategy(SingleProcessStrategy):
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
        self._wrapped: list[list[LightningOptimizer]] = [[]]  # [replica][optimizer]
        self._copies: list[list[Optimizer]] = []  # [replica - 1][optimizer]
        super().__init__(parallel_devices, None if split == "auto" else split, **kwargs)  # type: ignore[arg-type]
        self.allreduce = allreduce
        self.bucket_bytes = int(bucket_mb * 2**20)
        self._auto_split = AutoSplit() if split == "auto" else None
        self._lockstep: Lockstep | None = None  # in a step of manual optimization
        self._is_reduced = True  # else the replicas' gradients are parts of a sum
        self._reduced: list[tuple[Tensor | None, int]] = []  # the original's gradients after that, and their versions
        self._num_closures = 0
        self._is_stale = False  # somebody may have edited the original
        self._is_edited_between_steps = False
        self._handles: list[Any] = []

    # get_params: copy the parameters to every device

    @override
    def setup(self, trainer: Trainer) -> None:
        check_allreduce(self.allreduce, self.devices)
        super().setup(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        assert self.lightning_module is not None
        self._replicas = Replicas(self.lightning_module, self.devices)
        self._recorders = [Recorder(module) for module in self._replicas.modules]
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        self._syncs_batch_norm = self._layer_sync is not None and is_fitting and len(self.devices) > 1
        if self._syncs_batch_norm:
            for layers in self._replicas.batch_norms:
                synchronize_batch_norm(layers, self.team)
        return model

    @override
    def replicas(self) -> Sequence[LightningModule]:
        return self._replicas.modules

    @override
    def recorders(self) -> Sequence[Recorder]:
        return self._recorders

    @override
    def on_train_start(self) -> None:
        """Everything is restored by now, optimizers too: give every replica its own."""
        assert self.lightning_module is not None
        self._replicas.broadcast()
        originals, *others = zip(*self._replicas.parameters)
        self._copies = [[copy_optimizer(opt, originals, copies) for opt in self._optimizers] for copies in others]
        for i, copies in enumerate(self._copies, start=1):
            self._wrapped[i:] = [[LightningOptimizer._to_lightning_optimizer(opt, self) for opt in copies]]
        if len(self.devices) > 1:
            for n, optimizer in enumerate(self._optimizers):
                hook = optimizer.register_step_post_hook(lambda *_, n=n: self.update_replicas(n))
                self._handles.append(hook)
        self._is_edited_between_steps = _overrides(self.lightning_module, EDITING_HOOKS)

    # train_batch: loss and gradient of every shard

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if len(self.devices) == 1 or find_batch_size(batch) is None:
            return super().training_step(batch, *args, **kwargs)
        if self._is_stale or self._is_edited_between_steps or self._replicas.is_edited():
            self._replicas.broadcast()
            self._is_stale = False
        self._num_closures += 1
        sizes = self._sizes(batch)
        weights = {i: size / sum(sizes) for i, size in enumerate(sizes) if size}
        if not self.lightning_module.automatic_optimization:
            self._lockstep = Lockstep(self.team, weights, self._is_joint)
        try:
            with self.precision_plugin.train_step_context():
                active, sizes, outputs = self.run_step("training_step", batch, *args, **kwargs)
        finally:
            self._lockstep = None
        self._replicas.mark_norms()
        if not self.lightning_module.automatic_optimization:
            return gather(_without_graph(outputs), sizes, self.root_device)
        return self._combined(outputs, active, sizes)

    def _combined(self, outputs: list[Any], active: list[int], sizes: list[int]) -> Any:
        """What one device would return for the whole batch; its loss reaches all replicas."""
        losses = [output.get("loss") if isinstance(output, dict) else output for output in outputs]
        ran = [n for n, loss in enumerate(losses) if loss is not None]  # a step may return None to be skipped
        if not ran:
            return None
        losses, active, sizes = ([values[n] for n in ran] for values in (losses, active, sizes))
        backward = None if self._is_joint or len(ran) == 1 else partial(self._backward_in_threads, losses, active)
        loss = combine_losses(losses, sizes, backward)
        if not isinstance(outputs[ran[0]], dict):
            return loss
        rest = [{key: value for key, value in outputs[n].items() if key != "loss"} for n in ran]
        return {"loss": loss, **gather(_without_graph(rest), sizes, self.root_device)}

    @property
    def _is_joint(self) -> bool:
        """Whether one backward pass runs for all: autograd drives GPUs side by side by itself, but not CPU replicas.

        With synchronised BatchNorm the replicas' graphs are one.
        """
        return self._syncs_batch_norm or any(device.type != "cpu" for device in self.devices)

    def _backward_in_threads(
        self, losses: Sequence[Tensor], active: list[int], gradients: Sequence[Tensor], keep_graph: bool
    ) -> None:
        of = {i: (loss, gradient) for i, loss, gradient in zip(active, losses, gradients)}

        def backward(i: int) -> None:
            loss, gradient = of[i]
            if loss.requires_grad:
                loss.backward(gradient, retain_graph=keep_graph, create_graph=torch.is_grad_enabled())

        self._run("backward", backward, active)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of all shards and reduce them, before any hook or callback looks at them."""
        assert self.lightning_module is not None
        if self._lockstep is not None and self.team.is_running:
            module = self._replicas.modules[self.team.index]
            return self._lockstep.backward(self, module, closure_loss, optimizer, *args, **kwargs)
        self.begin_backward()
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with ExitStack() as stack:
            if not self._blocked and len(self.devices) > 1:
                stack.enter_context(deferred_gradient_hooks(self.lightning_module.parameters()))
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
            if not self._blocked:
                self.reduce_gradients()
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)
        return loss

    def begin_backward(self) -> None:
        """Take what was reduced off the replicas: the original carries it on if it was not set to zero since."""
        if self._is_reduced or all(original.grad is None for original, *_ in self._replicas.parameters):
            for _, *copies in self._replicas.parameters:
                for parameter in copies:
                    parameter.grad = None
        self._is_reduced = False

    # allreduce: sum the gradients, give the sum to every device

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Leave the sum of the replicas' gradients in every one of them, by `allreduce`.

        A parameter no replica used keeps no gradient; where some did not, theirs counts as zero. Sparse gradients are
        added up by torch.
        """
        if len(self.devices) > 1:
            dense: list[list[Tensor]] = []
            for parameters in self._replicas.parameters:
                gradients = [parameter.grad for parameter in parameters]
                if any(gradient is not None and gradient.is_sparse for gradient in gradients):
                    total = sum(g.to(self.root_device) for g in gradients if g is not None)
                    for parameter in parameters:
                        parameter.grad = total.to(parameter.device, copy=True).coalesce()  # type: ignore[union-attr]
                elif any(gradient is not None for gradient in gradients):
                    for parameter in parameters:
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                    dense.append([parameter.grad for parameter in parameters])  # type: ignore[misc]
            reduce_in_buckets(self.allreduce, dense, self.bucket_bytes)
        self._is_reduced = True
        self._reduced = [_version(original.grad) for original, *_ in self._replicas.parameters]

    # Every replica updates itself

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._num_closures = 0
        if self._lockstep is None or not self.team.is_running:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def before_closure() -> None:
            self._num_closures += 1
            if self._replicas.is_edited():
                self._replicas.broadcast()

        run = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self._lockstep.step(run, closure, before_closure)

    def update_replicas(self, n: int) -> None:
        """The original was updated by optimizer `n`: every other replica makes its own update, from the same gradient.

        Called by torch after the update, so not when a GradScaler skips it. What hooks and clipping made of the
        gradient is given to the replicas first.
        """
        optimizer = self._optimizers[n]
        if self._num_closures > 1 or isinstance(optimizer, LBFGS) or _scales_gradients(optimizer):
            self._replicas.broadcast()  # its update depends on more than one gradient, or on the scaler
            return
        changed = [
            parameters
            for parameters, reduced in zip(self._replicas.parameters, self._reduced)
            if not _is_same(_version(parameters[0].grad), reduced)
        ]
        with torch.no_grad():
            for original, *copies in changed:
                for parameter in copies:
                    parameter.grad = None if original.grad is None else original.grad.to(parameter.device, copy=True)
        for copies in self._copies:
            follow(optimizer, copies[n], self._mapping(copies))
            copies[n].step()
        if len({device.type for device in self.devices}) > 1:
            self._replicas.broadcast()  # a CPU and a GPU round differently
        self._replicas.mark_equal()

    @property  # type: ignore[override]
    def optimizers(self) -> list[Optimizer]:
        """Those of the replica the calling thread runs: what a module finds in a step of manual optimization."""
        index = self.team.index if hasattr(self, "team") else 0
        return self._copies[index - 1] if index else self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        return self._wrapped[self.team.index if hasattr(self, "team") else 0]

    @_lightning_optimizers.setter
    def _lightning_optimizers(self, optimizers: list[LightningOptimizer]) -> None:
        self._wrapped[0] = optimizers

    def _mapping(self, copies: list[Optimizer]) -> dict[int, nn.Parameter]:
        replica = 1 + next(i for i, others in enumerate(self._copies) if others is copies)
        return {id(parameters[0]): parameters[replica] for parameters in self._replicas.parameters}

    # Where others look at the original, or may have changed it

    def synchronize(self) -> None:
        """Combine BatchNorm's running statistics, and make all replicas equal to the original."""
        if len(self.devices) > 1:
            self._replicas.combine_batch_norms(self.shares)
            self._replicas.broadcast()

    @override
    def on_validation_start(self) -> None:
        self.synchronize()

    on_test_start = on_predict_start = on_train_end = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self._is_stale = True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if len(self.devices) > 1:
            self._replicas.combine_batch_norms(self.shares)
        return super().lightning_module_state_dict()

    @override
    def run_step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[Any]]:
        if self._replicas.refresh():
            self._draws.clear()
        result = super().run_step(name, batch, *args, **kwargs)
        self._replicas.collect()
        return result

    @override
    def _run(self, name: str, function: Callable[[int], Any], active: list[int]) -> list[Any]:
        if self._auto_split is None or name not in ("training_step", "backward"):
            return super()._run(name, function, active)
        results = super()._run(name, self._auto_split.timed(function, self.devices), active)
        if name == "training_step" and (shares := self._auto_split.next_shares(self.shares)):
            self.split = shares
        return results

    @override
    def teardown(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._copies, self._wrapped[1:], self._reduced = [], [], [], []
        self._recorders = []
        if hasattr(self, "_replicas"):
            for layers in self._replicas.batch_norms:
                vars(layers[0]).pop("forward", None)  # of synchronised BatchNorm
            del self._replicas
        super().teardown()


def _version(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    return gradient, -1 if gradient is None else gradient._version


def _is_same(now: tuple[Tensor | None, int], then: tuple[Tensor | None, int]) -> bool:
    return now[0] is then[0] and now[1] == then[1]


def _without_graph(outputs: Any) -> Any:
    return apply_to_collection(outputs, Tensor, Tensor.detach)


def _scales_gradients(optimizer: Optimizer) -> bool:
    """Whether a GradScaler leaves unscaling to the optimizer (fused ones under 16-mixed)."""
    return getattr(optimizer, "grad_scale", None) is not None


def _overrides(module: LightningModule, hooks: Sequence[str]) -> bool:
    """Whether the module or a callback of the user's own, not of Lightning or of this package, has one of the hooks."""
    callbacks = [
        callback
        for callback in module.trainer.callbacks  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith(("lightning.", "lightning_mgpu."))
    ]
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden(hook, callback) for hook in hooks for callback in callbacks
    )
