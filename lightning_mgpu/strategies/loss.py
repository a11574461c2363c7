"""What a `training_step` returns: a loss, and perhaps its weight, how many things it is a mean of.

`{"loss": loss, "weight": n}` is a mean over n tokens, labelled pixels or matched boxes. Shards and
accumulated batches then count by n.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def split_loss(output: Any) -> tuple[Tensor | None, float | None, Any]:
    """The 0-d loss, its weight (None without), and the output; all are None if the output is.

    The host waits for the device if the weight is a tensor there.
    """
    if output is None:
        return None, None, None
    is_dict = isinstance(output, Mapping)
    loss, weight = (output.get("loss"), output.get("weight")) if is_dict else (output, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MisconfigurationException(
            f"`training_step` returns {given} as its loss, which must be a tensor of one number."
        )
    try:
        weight = None if weight is None else float(weight)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if weight is not None and not 0 <= weight < math.inf:
        raise MisconfigurationException(
            f"The weight of a loss is {str(output['weight'])[:40]}: it must be one finite number, "
            "not negative, of the things that the loss is a mean of."
        )
    return loss.reshape(()), weight, output


def take_share(weights: Sequence[float], params: Iterable[Tensor]) -> float:
    """The last batch's share of all accumulated ones; scales the gradients of the others."""
    share = weights[-1] / (sum(weights) or 1.0)
    for param in params if len(weights) > 1 else ():
        if param.grad is not None:
            param.grad.mul_(1 - share)
    return share
