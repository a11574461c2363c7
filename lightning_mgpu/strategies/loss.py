"""The output of a training step: in `{"loss": loss, "weight": n}`, loss is a mean over n items."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def split_loss(output: Any) -> tuple[Tensor | None, float | None]:
    """Split the output of a step into the 0-d loss and its weight.

    Raises:
        MisconfigurationException: If the loss or the weight is not a scalar.
    """
    outputs = output if isinstance(output, Mapping) else {"loss": output}
    loss, weight = outputs.get("loss"), outputs.get("weight")
    if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise MisconfigurationException("The loss of `training_step` must be a scalar tensor.")
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise MisconfigurationException(
            f"The weight of a loss has {weight.numel()} elements: it must be a scalar, the number "
            "of samples, tokens or pixels that the loss is a mean over. Return the sum."
        )
    if weight is not None and not (math.isfinite(weight := float(weight)) and weight >= 0):
        raise MisconfigurationException(f"The weight of a loss is {weight}: must be finite, >= 0.")
    return None if loss is None else loss.reshape(()), weight


def scale_gradient(loss: Tensor, share: float) -> Tensor:
    """The loss, with its gradient scaled by a share. A share of 0 gives zeros, never NaN."""
    if share == 1:
        return loss
    if share == 0:
        return torch.zeros_like(loss, requires_grad=True)
    loss = loss.view_as(loss)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * share)
    return loss
