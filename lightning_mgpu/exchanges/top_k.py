"""Top-k sparsification (Stich et al., 2018, 'Sparsified SGD with Memory')."""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor


def top_k(X: Tensor, state: dict, fraction: float = 0.05) -> Generator[Any, Any, Tensor]:
    """Send the largest entries and their indices. Keep the others in `residual`."""
    whole = X.flatten() + state.get("residual", 0)
    indices = whole.abs().topk(max(1, round(fraction * whole.numel()))).indices
    values = whole[indices]
    state["residual"] = whole.index_fill(0, indices, 0)
    total = torch.zeros_like(whole)
    for their_values, their_indices in (yield values, indices):
        total.index_add_(0, their_indices, their_values)
    return total.view_as(X)
