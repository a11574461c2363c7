"""What a `training_step` returns: a loss, and perhaps how many things it is a mean of.

`{"loss": loss, "weight": n}` says that the loss is a mean over n things: tokens, labelled pixels,
matched boxes. Shards then count by n, and not by their samples.
"""

import math
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def split_loss(output: Any) -> tuple[Tensor | None, float | None, Any]:
    """The 0-d loss, its weight, and the output itself. The first two are None where there is none.

    The host waits for the device if the weight is a tensor there.

    Raises:
        MisconfigurationException: For a loss that is not one number, or an impossible weight.
    """
    loss, weight = output, None
    if isinstance(output, Mapping):
        loss, weight = output.get("loss"), output.get("weight")
    if loss is None and not isinstance(output, Mapping):
        return None, None, output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"{tuple(loss.shape)} values" if isinstance(loss, Tensor) else type(loss).__name__
        raise MisconfigurationException(
            f"`training_step` returns {given} as its loss: return a tensor of one number, or a "
            'dict with that as its "loss".'
        )
    return loss.reshape(()), None if weight is None else _read_weight(weight), output


def _read_weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise MisconfigurationException(
            f"The weight of a loss is {str(value)[:40]}: it must be one number, finite and not "
            "negative, that says how many things the mean is over."
        )
    return weight
