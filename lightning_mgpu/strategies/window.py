"""Gradient accumulation: the batches of one optimizer step form a window.

For every batch, Lightning calls the strategy's `training_step` and `backward`, which call:

    window.make_loss(output)        a loss for Lightning, weighted by the shard's share
    window.run_backward(backward)   a backward pass that accumulates into `window.gradients`

After the last batch, the strategy sums `window.gradients` over all replicas.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mgpu.distributed.comm.buckets import Gradients
from lightning_mgpu.strategies.loss import scale_gradient, split_loss


class AccumulationWindow:
    """The batches of one optimizer step, and their accumulated gradients.

    Batches are weighted equally: Lightning divides each loss by their number. If losses have
    weights, the gradient of the window is the weighted mean over its batches.

    Args:
        module: Attached to a Trainer.
        compute_share: Returns this replica's share of the samples in the current batch.
        gather_weights: All-gathers the weight of a loss over the replicas: (1,) to (k, 1).
        needs_all: Whether every replica needs a positive weight, as for `sync_batchnorm`.
    """

    def __init__(
        self,
        module: LightningModule,
        compute_share: Callable[[], float],
        gather_weights: Callable[[np.ndarray], np.ndarray],
        needs_all: bool = False,
    ) -> None:
        self.module, self.compute_share = module, compute_share
        self.gather_weights, self.needs_all = gather_weights, needs_all
        self.epoch = module.trainer.current_epoch  # a window ends with its epoch
        self.num_batches = module.trainer.accumulate_grad_batches
        self.gradients: Gradients = {}
        self.earlier: Gradients | None = None  # gradients from before the window
        self.has_weights: bool | None = None  # identical for all losses of a window
        self.weight = 0.0  # sum over all batches so far
        self.decay = 1.0  # factor of the gradients so far, before the next ones are added
        self.factor = 1.0  # of the last batch's loss
        self.share, self.total_share = 0.0, 0.0  # of this replica, and of all replicas

    @property
    def mean_share(self) -> float:
        return self.share / self.total_share if self.total_share else 0.0

    def make_loss(self, output: Any) -> Any:
        """The output of a step, with a loss whose gradient is weighted."""
        loss, weight = split_loss(output)
        if loss is None:
            if self.module.trainer.world_size > 1 or weight is not None:
                raise MisconfigurationException(
                    "`training_step` returned None: every shard needs a loss. To ignore one, "
                    'return {"loss": loss, "weight": 0}.'
                )
            self.weigh_batch(None)
            return output
        loss = scale_gradient(loss, self.weigh_batch(weight))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def weigh_batch(self, weight: float | None) -> float:
        """The factor of this replica's loss, from its weight or its shard's number of samples.

        Raises:
            ValueError: If only some losses of the window have a weight, or a non-finite sum.
        """
        has_weight = weight is not None
        if self.has_weights not in (None, has_weight):
            rule = "all losses of an optimizer step need one, or none"
            raise ValueError(f"Only some losses have a weight: {rule}.")
        self.has_weights, self.decay, scale = has_weight, 1.0, 1.0
        if weight is None:
            share = self.compute_share()
        else:
            all_weights = self.gather_weights(np.array([weight], np.float64))
            total = float(all_weights.sum())
            if not math.isfinite(total) or (0 in all_weights and self.needs_all):
                rule = "the sum must be finite, and with sync_batchnorm every weight positive"
                raise ValueError(f"Losses of a batch have weights {all_weights.tolist()}: {rule}.")
            share = weight / (total or 1.0)
            if self.module.automatic_optimization:  # else each call is weighted separately
                before, self.weight = self.weight, self.weight + total
                self.decay = before / self.weight if self.weight else 1.0
                scale = self.num_batches * (1 - self.decay)
        self.factor = share * scale
        self.share = self.share * self.decay + self.factor
        self.total_share = self.total_share * self.decay + scale
        return self.factor

    def run_backward(self, backward: Callable[[], Any], is_blocked: bool) -> None:
        """Accumulate the gradient of a batch.

        Args:
            backward: The backward pass.
            is_blocked: Whether more batches of the window follow.

        Raises:
            MisconfigurationException: If earlier gradients are views of a larger tensor.
        """
        parameters = [*self.module.parameters()]
        if self.earlier is None:
            self.earlier = get_gradients(parameters)
            if is_blocked and not self.module.automatic_optimization:
                self._divide_earlier()
        else:
            self.gradients = get_gradients(parameters)  # hooks may have edited them
        if self.decay != 1:
            decay, self.decay = self.decay, 1.0
            self.gradients = {p: g * decay for p, g in self.gradients.items()}
        for p in parameters:
            p.grad = self.gradients.get(p)
        backward()
        self.gradients = get_gradients(parameters)

    def _divide_earlier(self) -> None:
        """Move an equal part of the earlier gradients to each replica.

        In manual optimization, an optimizer may zero or use them before the window ends.
        """
        num, earlier, self.earlier = self.module.trainer.world_size, self.earlier or {}, {}
        if num > 1 and any(g.untyped_storage().nbytes() > g.nbytes for g in earlier.values()):
            raise MisconfigurationException(
                "sync_grad=False is not supported if gradients are views of a larger tensor, for "
                "example of an optimizer's flat gradient."
            )
        self.gradients = {p: g.detach() / num if num > 1 else g for p, g in earlier.items()}


def get_gradients(parameters: Sequence[Tensor]) -> Gradients:
    return {p: p.grad for p in parameters if p.grad is not None}
