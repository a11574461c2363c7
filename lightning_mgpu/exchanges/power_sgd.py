"""PowerSGD: low-rank gradient compression (Vogels et al., 2019, 'PowerSGD')."""

from collections.abc import Generator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor


def power_sgd(X: Tensor, state: Any, rank: int = 2) -> Generator[Any, Any, Tensor]:
    """One subspace iteration on the sum, from the previous Q. Keep the error in `residual`.

    Rows are a layer's outputs. Tensors that two factors would not compress are sent whole.
    """
    n, m = X.flatten(1).shape if X.ndim > 1 else (1, 1)
    if rank * (n + m) >= n * m:
        return sum((yield X))
    M = X.flatten(1) + state.get("residual", 0)
    if "Q" not in state:  # identical in all replicas
        generator = torch.Generator().manual_seed(crc32(f"{state.name} {state.seed}".encode()))
        state["Q"] = torch.randn(m, rank, generator=generator).to(X)
    P = torch.linalg.qr(sum((yield M @ state["Q"]))).Q
    own = M.T @ P
    state["residual"] = M - P @ own.T
    state["Q"] = sum((yield own))
    return (P @ state["Q"].T).view_as(X)


# with `flat=True` it would send everything
power_sgd.needs_matrices = True  # type: ignore[attr-defined]
