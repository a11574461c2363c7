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
    except (TypeError, ValueError, RuntimeError, OverflowError):
        is_number = not isinstance(value, Tensor) or not value.ndim
        given = repr(value)[:40] if is_number else f"{tuple(value.shape)} values"
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
        self.counted = self.counted or 0.0
        if not weight or not loss.requires_grad:
            return loss
        share: float | None = None  # of this batch in what the window has counted

        def enter(gradient: Tensor) -> Tensor:
            """Counts now: the module's own `backward` may have left batches out."""
            nonlocal share
            if share is None:
                share = self._count(weight)
            # Lightning has divided the loss by the number of batches
            return gradient * (self._num_batches * share)

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
                self.fill_gradients()
            return result

        return close

    def fill_gradients(self) -> None:
        """Give zeros to parameters without a gradient, sparse ones to sparse embeddings."""
        layers = [layer for layer in self.module.modules() if getattr(layer, "sparse", False)]
        are_sparse = {id(param) for layer in layers for param in layer.parameters()}
        for param in self._trained():
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse(1) if id(param) in are_sparse else zeros

    def _count(self, weight: float) -> float:
        """Count a batch, scale the gradients of those before it, and return the batch's share."""
        params = [param for param in self._trained() if param.grad is not None]
        before = (self.counted or 0.0) if params else 0.0
        self.counted = before + weight
        for param in params if before else ():
            gradient: Any = param.grad
            is_graph = torch.is_grad_enabled()  # create_graph=True
            scale = gradient.mul if is_graph else gradient.mul_
            param.grad = scale(before / self.counted)
        return weight / self.counted

    def _trained(self) -> list[Tensor]:
        """The module's parameters, and what else the optimizers have."""
        groups = [group for each in self.module.trainer.optimizers for group in each.param_groups]
        params = [*self.module.parameters(), *(p for group in groups for p in group["params"])]
        return list({id(param): param for param in params}.values())

    @property
    def _batch_idx(self) -> int:
        return self.module.trainer.fit_loop.epoch_loop.batch_idx

    @property
    def _num_batches(self) -> int:
        return self.module.trainer.accumulate_grad_batches


def nothing(loss: Tensor) -> Tensor:
    """A loss that is zero and has no gradient for the parameters: a mean over nothing is NaN."""
    return torch.zeros_like(loss + 0.0, requires_grad=True)
