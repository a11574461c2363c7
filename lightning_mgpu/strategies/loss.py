"""The output of a step: `{"loss": loss, "weight": n}` is a mean over n things."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def split_loss(output: Any) -> tuple[Tensor | None, float | None]:
    """The 0-d loss, and its weight.

    Raises:
        MisconfigurationException: If one of them is not a number.
    """
    given = output if isinstance(output, Mapping) else {"loss": output}
    loss, weight = given.get("loss"), given.get("weight")
    if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise MisconfigurationException("A step's loss must be a tensor of one number.")
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise MisconfigurationException(
            f"The weight of a loss has {weight.numel()} numbers: give their sum, one number of "
            "samples, tokens or pixels over which the loss is a mean."
        )
    if weight is not None and not (math.isfinite(weight := float(weight)) and weight >= 0):
        raise MisconfigurationException(f"The weight of a loss is {weight}: it must be 0 or more.")
    return None if loss is None else loss.reshape(()), weight


def scale_gradient(loss: Tensor, share: float) -> Tensor:
    """The loss, with its gradient times a share. With share 0 there is none, not even NaN."""
    if share == 1:
        return loss
    if share == 0:
        return torch.zeros_like(loss, requires_grad=True)
    loss = loss.view_as(loss)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * share)
    return loss
