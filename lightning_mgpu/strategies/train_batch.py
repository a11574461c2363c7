"""`train_batch` of the book as a Lightning Strategy: k replicas, k shards, k losses, one gradient.

The Trainer calls `optimizer_step`, whose closure calls `training_step` and `backward`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.devices_and_attributes import replace_attributes
from lightning_mgpu.strategies.hooks import TORCH_OPTIMIZERS, may_edit_before_checks
from lightning_mgpu.strategies.layers import check_layers
from lightning_mgpu.strategies.loss_weight import WEIGHT, find_weights, nothing
from lightning_mgpu.strategies.run_step import RunStepStrategy
from lightning_mgpu.strategies.same_program import digest_weights, share_records


class TrainBatchStrategy(RunStepStrategy):
    """Trains k replicas of a module, each on its shard of the batch.

    For the options see `ManualAllreduceStrategy`. Subclasses say in `reduce_gradients` how
    gradients are summed, and in `update_replicas` who makes the update.
    """

    # A step

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_automatic:
            self.window.begin_batch()
        if not self.is_split:
            output = super().training_step(batch, *args, **kwargs)
            return self._join_losses({0: output}, output) if self._is_automatic else output
        with self.precision_plugin.train_step_context():
            outputs = self._run("training_step", batch, *args, **kwargs)
        by_replica = dict(zip(self.sizes, outputs))
        if self._is_automatic and all(isinstance(output, Tensor) for output in outputs):
            return self._join_losses(by_replica, None)
        whole = self._gather("training_step", outputs)
        return self._join_losses(by_replica, whole) if self._is_automatic else whole

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self._evaluate("validation_step", context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self._evaluate("test_step", context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self._evaluate("predict_step", context, *args, **kwargs)

    def _evaluate(self, name: str, context: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return getattr(super(), name)(*args, **kwargs)
        with context():
            return self._gather(name, self._run(name, *args, **kwargs))

    # From losses to updates

    def _join_losses(self, outputs: dict[int, Any], whole: Any) -> Any:
        """The output of a training step for the Trainer, with the whole batch's loss."""
        losses: dict[int, Tensor] = {}
        for i, output in outputs.items():
            if output is not None:
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    return output  # Lightning says what is wrong with it
                losses[i] = loss
        if not losses:
            return whole
        weights = find_weights(outputs)
        weight = {WEIGHT: sum(weights.values())} if weights else {}
        loss = self.window.weigh(self._join(losses, weights), weight.get(WEIGHT))
        if isinstance(whole, Mapping):
            return whole if loss is whole["loss"] else {**whole, "loss": loss, **weight}
        return loss

    def _join(self, losses: dict[int, Tensor], weights: dict[int, float]) -> Tensor:
        if not self.is_split:
            return losses[0] if weights.get(0, 1) else nothing(losses[0])
        return self.gradients.join(losses, weights or self.sizes, self.batch_graph)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute and reduce the gradients of all shards, before any hook looks at them."""
        if self.is_split and self._is_automatic:
            return self._backward(closure_loss, optimizer, *args, **kwargs)
        # `self.manual_backward(loss, weight=n)`
        weight = {WEIGHT: kwargs.pop(WEIGHT)} if WEIGHT in kwargs else {}

        def together(given: dict[int, tuple[Tensor, Any]]) -> Tensor:
            weights = find_weights({i: weight for i, (_, weight) in given.items()})
            loss = self._join({i: loss for i, (loss, _) in given.items()}, weights)
            if weights and not any(weights.values()):
                self.window.fill_gradients()
            if not self.is_split:
                return super(TrainBatchStrategy, self).backward(loss, optimizer, *args, **kwargs)
            return self._backward(loss, optimizer, *args, **kwargs)

        given = closure_loss, weight
        if self.is_split and self.lockstep.running:
            loss: Tensor = self.lockstep.meet(("manual_backward", None), given, together)
            return loss
        return together({0: given})  # one replica has the whole batch

    def _backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.gradients.are_reduced = False
        self.gradients.reducer.is_check_due = self.is_check_due
        passes = []

        def noted(name: str) -> tuple[Any, str, Any]:
            function = getattr(torch.autograd, name)

            def note(*args: Any, **kwargs: Any) -> Any:
                passes.append(name)
                return function(*args, **kwargs)

            return torch.autograd, name, note

        with (
            replace_attributes([noted("backward"), noted("grad")]),
            self._synchronized_batch_norm(),
        ):
            loss = super().backward(loss, optimizer, *args, **kwargs)
        if passes and not self.gradients.are_reduced:
            # a `backward` of the user's own may leave a batch out
            raise RuntimeError(
                "backward must be for all parameters, by loss.backward() without inputs=: nothing "
                "reduced the gradients."
            )
        if not self._is_automatic:
            self.gradients.push()  # those that the module's own `backward` has changed
            # hooks may have stepped an optimizer, and the step's next forward pass is to come
            self.replicas.push_weights(is_sure=False)
        self.replicas.distrust()  # before its update an optimizer may try other weights
        return loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        closure = self.window.closing(closure)
        if not self.is_split:
            return step(closure=closure)
        if type(optimizer) not in TORCH_OPTIMIZERS:
            self.replicas.distrust()  # it may edit weights before its closure runs the step
        return self.step_and_follow(optimizer, step, closure)

    # Around steps, where weights and the optimizers' states may be edited

    def _distrust_replicas(self) -> None:
        if not self.is_split:
            return
        module = self.replicas.module
        were_equal = self.updates.was_repeated and self.replicas.are_as_marked
        if were_equal and not may_edit_before_checks(module):
            self.updates.check_equality()
        self.replicas.notes.flush()
        self.replicas.distrust()
        self._is_first_step = self.gradients.is_manual_check_due = True
        self.gradients.forget()
        self.updates.copy_again()
        check_layers(module, sync_batchnorm=self._layer_sync is not None)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batch_idx = batch_idx
        if batch_idx == 0:
            self._distrust_replicas()

    @override
    def on_validation_start(self) -> None:
        self._batch_idx = -1
        self._distrust_replicas()

    on_validation_end = on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_start

    @override
    def on_train_end(self) -> None:
        self._distrust_replicas()
        if self.processes.num > 1:
            share_records(self.processes, "the end of training", {}, digest_weights(self.replicas))

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._distrust_replicas()  # `on_save_checkpoint` may edit
        return super().lightning_module_state_dict()
