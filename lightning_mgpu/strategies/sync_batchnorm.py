"""BatchNorm over the whole batch: replicas exchange mean and variance, as `sync_batchnorm=True` promises.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1, with the batch spread over devices). What
was exchanged stays in the autograd graph, so one backward pass over all losses gives the whole gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_mgpu.strategies.lockstep import Lockstep

own_batch_norm = F.batch_norm


@contextmanager
def synchronized_batch_norm(lockstep: Lockstep, index: Any) -> Iterator[None]:
    """Let `F.batch_norm`, which every BatchNorm layer calls, take the whole batch's statistics inside the block.

    Args:
        lockstep: Where replicas meet.
        index: Returns the number of the replica whose turn it is.
    """

    def batch_norm(
        X: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training and torch._C._current_graph_task_id() != -1:  # private: whether a backward pass runs
            raise RuntimeError("sync_batchnorm=True needs its layers outside of activation checkpointing.")
        if not training or not lockstep.is_inside:
            return own_batch_norm(X, running_mean, running_var, weight, bias, training, momentum, eps)
        moments = _Moments.apply(X)
        shares = [_Share.apply(moment, len(lockstep.active)) for moment in moments]
        offered = lockstep.meet(("BatchNorm", None), (X.numel() // X.size(1), *shares), dict)
        mine = list(offered).index(index())
        counts = [count for count, *_ in offered.values()]
        means, squares = ([part[n][mine].to(X.device) for part in offered.values()] for n in (1, 2))  # (C,) each
        total = sum(counts)
        if total == 1:  # as torch does
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {X.size()}")
        mean = torch.stack([own * (n / total) for own, n in zip(means, counts)]).sum(0)
        between = [n * (own - mean).square() for own, n in zip(means, counts)]
        var = torch.stack([*squares, *between]).sum(0) / total  # Chan, Golub and LeVeque (1983)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return _Normalise.apply(X, mean, var, weight, bias, eps)  # type: ignore[no-any-return]

    with patch.object(F, "batch_norm", batch_norm):
        yield


def check_layers(module: nn.Module) -> None:
    """Refuse compiled layers around BatchNorm: their graphs do not call `F.batch_norm`.

    Raises:
        MisconfigurationException: One line with the fix.
    """
    for layer in module.modules():
        is_compiled = isinstance(layer, torch._dynamo.OptimizedModule) or layer._compiled_call_impl is not None
        if is_compiled and any(isinstance(part, _BatchNorm) for part in layer.modules()):
            raise MisconfigurationException(
                "sync_batchnorm=True does not reach BatchNorm in compiled layers: leave one of the two out."
            )


class _Moments(torch.autograd.Function):
    """Mean and sum of squared differences from it, (C,) each, of X (N, C, ...), in float32 at least."""

    @staticmethod
    def forward(ctx: Any, X: Tensor) -> tuple[Tensor, Tensor]:
        dims, shape = _axes(X)
        Z = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
        mean = Z.mean(dims)
        squares = (Z - mean.view(shape)).square_().sum(dims)  # two passes: no cancellation
        ctx.save_for_backward(X, mean)
        return mean, squares

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_squares: Tensor) -> Tensor:  # type: ignore[override]
        X, mean = ctx.saved_tensors
        shift = grad_mean * (X.size(1) / X.numel())
        return torch.batch_norm(X, 2 * grad_squares, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, False)


class _Share(torch.autograd.Function):
    """One copy of a replica's moment for each of k replicas.

    Their gradients come back in any order where autograd has a thread a device. They are added in that of the replicas.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, k: int) -> tuple[Tensor, ...]:
        return tuple(part.clone() for _ in range(k))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.stack(grads).sum(0), None


class _Normalise(torch.autograd.Function):
    """`batch_norm` with given mean and variance, differentiated by these, too, in one pass over memory each way."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(X, mean, var, weight)
        ctx.eps = eps
        return torch.batch_norm(X, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        X, mean, var, weight = ctx.saved_tensors
        invstd = torch.rsqrt(var + ctx.eps)
        grad_X, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, X, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        scale = weight * invstd
        return grad_X, -scale * grad_bias, -0.5 * scale * invstd * grad_weight, grad_weight, grad_bias, None


def _axes(X: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions summed over, and the shape (1, C, 1, ...) of what is left."""
    return [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
