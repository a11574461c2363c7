"""One update, from the steps of its first batch to the gradients of its last one.

For every batch, Lightning calls `training_step` and then `backward` of the strategy, which calls:

    update.run_step(step, shards)       the user's step on each shard here
    update.make_loss(outputs)           one loss for Lightning; each shard counts by its share
    update.run_backward(backward)       a backward pass for each replica here

After the last batch of a window the strategy exchanges `update.gradients`, and the update is over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor

from lightning_mgpu.routes.buckets import Gradients, versions_of
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.strategies.buffers import ReplicaBuffers
from lightning_mgpu.strategies.loss import scale_gradient, split_loss


class Update:
    """The batches of one update, which are summed here.

    Every batch counts alike: Lightning divides each loss by their number. If losses have weights,
    the gradient of the window is the weighted mean over its batches.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.module = strategy, strategy.module
        self.epoch = self.module.trainer.current_epoch  # a window does not reach into the next one
        self.num_batches = self.module.trainer.accumulate_grad_batches
        self.num_local = num_local = strategy.num_local
        self.gradients: list[Gradients] = [{} for _ in range(num_local)]
        self.earlier: Gradients | None = None  # what parameters had before the first batch
        self.buffers: ReplicaBuffers | None = None  # of the replicas here, until they are shared
        self.has_weights: bool | None = None  # all losses of a window, or none
        self.weight = 0.0  # of all batches so far
        self.decay = 1.0  # by which gradients so far are multiplied before the next ones are added
        self.shares, self.total_share = [0.0] * num_local, 0.0  # of the replicas here, and of all
        self.scale_probe: Any = None  # what a loss gets that is not a replica's own
        callbacks: Any = vars(self.module.trainer)["callbacks"]
        self.finds_rate = any(isinstance(each, _LRCallback) for each in callbacks)

    @property
    def mean_shares(self) -> list[float]:
        total = self.total_share
        return [share / total if total else 0.0 for share in self.shares]

    def run_step(self, step: Callable[[Any], Any], shards: Sequence[Any]) -> list[Any]:
        """The outputs of the user's step on each shard."""
        if self.strategy.num_replicas == 1:
            return [step(shards[0])]
        if self.buffers:
            self.buffers.refuse_edits(is_thorough=True)
        buffers = self.buffers or ReplicaBuffers(self.module, self.num_local)
        outputs, before = [], self._look_at_weights()
        for i, shard in enumerate(shards):
            buffers.hold(i)
            with self.strategy.log_as(shard), self.strategy.random_numbers_of(i, "step"):
                outputs.append(step(shard))
            buffers.take()
            if i == 0 and self._look_at_weights() != before:
                raise MisconfigurationException(
                    "`training_step` edits weights, which several replicas of one process have in "
                    "common: leave out `replicas`, or edit in `on_train_batch_end`."
                )
        self.buffers = buffers if buffers.num_bytes else None
        return outputs

    def _look_at_weights(self) -> Any:
        """Another value after an edit. A checksum waits for the device, but sees `.data`, too.

        Frozen weights are those that steps edit by hand, for example a teacher's: 256 numbers of
        each are enough to notice. All are compared in two steps, as some edits begin late.
        """
        weights = [*self.module.parameters()] if self.num_local > 1 else []
        looked_at = [p.detach().flatten()[:256] for p in weights if not p.requires_grad]
        if self.module.trainer.fit_loop.total_batch_idx in (0, 3):
            looked_at = weights
        return [(p._version, p.data_ptr()) for p in weights], checksum(looked_at)

    def make_loss(self, outputs: list[Any]) -> Any:
        """One loss for Lightning, in whose backward pass each shard counts by its share.

        With several replicas here it is their mean loss, and its backward pass only finds out the
        factor, for example GradScaler's, for the passes of the shards. LearningRateFinder gets the
        mean loss of all.
        """
        losses, weights = zip(*map(split_loss, outputs))
        if self.strategy.num_replicas == 1 and weights[0] is None:
            self.count_batch(weights)
            return outputs[0]
        if any(loss is None for loss in losses):
            raise MisconfigurationException(
                "`training_step` returned None: every shard needs a loss. To leave one out of the "
                'mean, return {"loss": loss, "weight": 0}.'
            )
        self.losses, self.factors = losses, self.count_batch(weights)
        self.scale_probe = None
        if self.num_local == 1 and not self.finds_rate:
            loss = scale_gradient(losses[0], self.factors[0])
        else:
            loss = self.scale_probe = self._find_mean().requires_grad_()
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss

    def _find_mean(self) -> Tensor:
        """The mean loss of the replicas here, without waiting for the device; or that of all."""
        rows: Any = [(loss.detach(), factor) for loss, factor in zip(self.losses, self.factors)]
        if self.finds_rate:
            here = np.array([[loss.item(), factor] for loss, factor in rows]).reshape(-1)
            rows = self.strategy.meeting.gather(here, "losses").reshape(-1, 2).tolist()
        mean, total = torch.zeros_like(self.losses[0]), sum(factor for _, factor in rows)
        for loss, factor in rows:  # in the order of replicas, for the same bits
            if factor:  # a loss with weight 0 may be NaN: it does not count
                mean += loss * (factor / total)
        return mean

    def count_batch(self, weights: Sequence[float | None]) -> list[float]:
        """The factors of the losses here: by their weights, or by the samples of their shards.

        Raises:
            ValueError: If only some losses of the update have a weight, or their sum is not finite.
        """
        has_weights = weights[0] is not None
        kinds = {self.has_weights, *(weight is not None for weight in weights)} - {None}
        if kinds != {has_weights}:
            raise ValueError("Only some losses have a weight: all of an update need one, or none.")
        self.has_weights, self.decay, scale = has_weights, 1.0, 1.0
        if not has_weights:
            shares = self.strategy.find_shares()
        else:  # their sum is known nowhere else
            here = np.array(weights, np.float64)
            all_weights = self.strategy.gather_weights(here)
            total = float(all_weights.sum())
            if not math.isfinite(total) or (0 in all_weights and self.strategy._layer_sync):
                how = "their sum must be finite, and with sync_batchnorm each > 0"
                raise ValueError(f"Losses of a batch have weights {all_weights.tolist()}: {how}.")
            shares = (here / (total or 1.0)).tolist()
            if self.module.automatic_optimization:  # else each call is weighed by itself
                before, self.weight = self.weight, self.weight + total
                self.decay = before / self.weight if self.weight else 1.0
                scale = self.num_batches * (1 - self.decay)
        factors = [share * scale for share in shares]
        self.shares = [old * self.decay + new for old, new in zip(self.shares, factors)]
        self.total_share = self.total_share * self.decay + scale
        return factors

    def run_backward(self, backward: Callable[[], Any], starting: Callable[..., Any]) -> None:
        """Add the gradients of this batch.

        `starting(before)` is a context for the pass of the last replica here, in which buckets
        start. `before` has the gradients of the others.
        """
        parameters = [*self.module.parameters()]
        self._prepare(parameters)
        if self.scale_probe is None:
            with starting([]):
                backward()
            self.gradients = [get_gradients(parameters)]
            return
        if self.buffers:
            self.buffers.refuse_edits(is_thorough=False)
        backward()  # its own only finds out the factor
        last = self.num_local - 1
        for i, (loss, factor) in enumerate(zip(self.losses, self.factors)):
            set_gradients(parameters, self.gradients[i])
            if self.buffers:  # activation checkpointing may run layers a second time
                self.buffers.hold(i)
            if factor:
                with starting(self.gradients[:last]) if i == last else nullcontext():
                    loss.backward(self.scale_probe.grad * factor)
            if self.buffers:
                self.buffers.take()
            self.gradients[i] = get_gradients(parameters)
        if self.buffers:
            self.buffers.hold(0)
        set_gradients(parameters, self.gradients[0])
        self.versions = versions_of(self.gradients[:1])

    def _prepare(self, parameters: list[Tensor]) -> None:
        """Before a backward pass: parameters have the first replica's gradients so far.

        Raises:
            MisconfigurationException: If a hook has edited one of several replicas' gradients, or
                if gradients of before might be zeroed meanwhile.
        """
        if self.earlier is None:
            self.earlier = get_gradients(parameters)
            is_manual = not self.module.automatic_optimization
            if self.earlier and is_manual and self.strategy._is_blocked:
                raise MisconfigurationException(
                    "A pass with sync_grad=False, while parameters have gradients of before: call "
                    "`zero_grad()` of every optimizer right after its `step()`."
                )
        elif self.num_local == 1:
            self.gradients = [get_gradients(parameters)]  # as hooks have left them
        elif versions_of([get_gradients(parameters)]) != self.versions:
            raise MisconfigurationException(
                "A hook has edited gradients that are still being accumulated, of one of several "
                "replicas here: edit them in the last batch of a window, or leave out `replicas`."
            )
        if self.decay != 1:
            decay, self.decay = self.decay, 1.0
            self.gradients = [{p: g * decay for p, g in each.items()} for each in self.gradients]
        set_gradients(parameters, self.gradients[0])


def get_gradients(parameters: list[Tensor]) -> Gradients:
    return {p: p.grad for p in parameters if p.grad is not None}


def set_gradients(parameters: list[Tensor], gradients: Gradients) -> None:
    for p in parameters:
        p.grad = gradients.get(p)
