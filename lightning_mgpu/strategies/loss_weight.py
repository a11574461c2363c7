"""Losses weighted by what they count: `training_step` returns `{"loss": loss, "weight": n}`.

The loss is a mean over n things: tokens, labelled pixels, matched boxes. The gradient of an update
is then the gradient of the weighted mean over all shards and all accumulated batches,
sum(n * dloss) / sum(n). It is kept as a running mean, so every hook sees a true mean, and a window
that ends early needs no correction.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

WEIGHT = "weight"  # the key


def read_weight(value: Any) -> float:
    """A weight as a number. The host waits for a GPU if the weight is a tensor there.

    Raises:
        MisconfigurationException: If it is not one number, or negative, or not finite.
    """
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"{tuple(value.shape)} values" if isinstance(value, Tensor) else repr(value)
        raise MisconfigurationException(
            f"The weight of a loss is {given}: return one number, how many things the mean is over."
        ) from None
    if not math.isfinite(weight) or weight < 0:
        raise MisconfigurationException(
            f"The weight of a loss is {weight}: it must be finite, and not negative."
        )
    return weight


def find_weights(outputs: Mapping[int, Any]) -> dict[int, float]:
    """The weights that replicas return with their losses; empty if none of them does.

    Raises:
        MisconfigurationException: If only some replicas return one, or for a wrong weight.
    """
    present = {i: each for i, each in outputs.items() if each is not None}
    weights = {
        i: read_weight(each[WEIGHT])
        for i, each in present.items()
        if isinstance(each, Mapping) and WEIGHT in each
    }
    if weights and len(weights) < len(present):
        raise MisconfigurationException(
            f"Replicas {[*weights]} give their losses a weight, the others do not: return one for "
            "every shard. The weight of a shard with nothing to count is 0."
        )
    return weights


class Window:
    """The batches whose gradients make one update, and how much they have counted so far."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.counted: float | None = None  # None before the first loss, and without weights
        self._has_losses = False

    def begin_batch(self) -> None:
        """A training step begins, perhaps the first of a window."""
        if self._batch_idx % self._num_batches == 0:
            self.counted, self._has_losses = None, False

    def weigh(self, loss: Tensor, weight: float | None) -> Tensor:
        """A batch's loss, whose backward pass leaves the weighted mean in the gradients.

        Args:
            loss: The mean of the batch. Its value stays as it is.
            weight: How many things the mean is over; None without weights.

        Raises:
            MisconfigurationException: If some batches of a window have weights, and others do not.
        """
        if self._has_losses and (weight is None) != (self.counted is None):
            raise MisconfigurationException(
                f"Batch {self._batch_idx} gives its loss {'no' if weight is None else 'a'} weight, "
                "unlike the batches before whose gradients it is added to: return a weight for "
                "all batches, or for none."
            )
        self._has_losses = True
        if weight is None:
            return loss
        before, self.counted = self.counted or 0.0, (self.counted or 0.0) + weight
        if not weight or not loss.requires_grad:
            return loss
        after, is_entered = self.counted, False

        def enter(gradient: Tensor) -> Tensor:
            nonlocal is_entered
            if before and not is_entered:
                self._scale_gradients(before / after)
            is_entered = True
            # Lightning has divided the loss by the number of batches
            return gradient * (self._num_batches * weight / after)

        loss = loss.view_as(loss)  # the user's own tensor gets no hook
        loss.register_hook(enter)
        return loss

    def closing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an update. If the window has counted nothing, its gradients are zero."""

        def close() -> Any:
            result = closure()
            if self.counted == 0:
                rank_zero_warn(
                    f"The update after batch {self._batch_idx} of epoch "
                    f"{self.module.current_epoch} has nothing to count: its losses have weight 0. "
                    "Its gradients are zero."
                )
                for param in self.module.parameters():
                    if param.requires_grad and param.grad is None:
                        param.grad = torch.zeros_like(param)
            return result

        return close

    @torch.no_grad()
    def _scale_gradients(self, factor: float) -> None:
        gradients = [param.grad for param in self.module.parameters() if param.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @property
    def _batch_idx(self) -> int:
        return self.module.trainer.fit_loop.epoch_loop.batch_idx

    @property
    def _num_batches(self) -> int:
        return self.module.trainer.accumulate_grad_batches


def nothing(loss: Tensor) -> Tensor:
    """A loss that is zero and has no gradient for the parameters: a mean over nothing is NaN."""
    return torch.zeros_like(loss, requires_grad=True)
