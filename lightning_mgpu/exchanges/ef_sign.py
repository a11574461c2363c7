"""EF-signSGD: one bit per entry (Karimireddy et al., 2019, 'Error Feedback Fixes SignSGD')."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def ef_sign(X: Tensor, state: dict) -> Generator[Any, Any, Tensor]:
    """Send the signs, eight per byte, and the mean magnitude. Keep the error in `residual`."""
    whole = X.flatten() + state.get("residual", 0)
    scale, places = whole.abs().mean(), 2 ** torch.arange(8, device=X.device)
    bits = F.pad(whole >= 0, (0, -len(whole) % 8)).view(-1, 8)
    packed = (bits * places).sum(1).to(torch.uint8)

    def unpack(packed: Tensor, scale: Tensor) -> Tensor:
        is_positive = (packed[:, None] & places).flatten()[: len(whole)] != 0
        return torch.where(is_positive, scale, -scale)

    state["residual"] = whole - unpack(packed, scale)
    signs = [unpack(*pair) for pair in (yield packed, scale)]
    return sum(signs, torch.zeros_like(whole)).view_as(X)
