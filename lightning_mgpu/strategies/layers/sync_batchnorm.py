"""BatchNorm over the whole batch: replicas exchange mean and variance, as `sync_batchnorm=True` promises.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1, with the batch spread over devices). What
was exchanged stays in the autograd graph, so one backward pass over all replicas' losses gives the full gradient. The
passes over the images themselves are few: torch's own kernels for evaluation, which take mean and variance.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from lightning_mgpu.strategies.layers.own_forward import OwnForward
from lightning_mgpu.strategies.threads.team import Team


def synchronize_batch_norm(layers: Sequence[_BatchNorm], team: Team) -> None:
    """Let the replicas' copies of one layer normalise with the statistics of the whole batch while they train."""
    for layer in layers:
        vars(layer)["forward"] = _Synchronized(layer, team)


class _Synchronized(OwnForward):
    layer: _BatchNorm

    def __call__(self, X: Tensor) -> Tensor:
        uses_batch = self.layer.training or self.layer.running_mean is None
        if uses_batch and torch._C._current_graph_task_id() != -1:  # replicas cannot meet inside a backward pass
            raise RuntimeError("sync_batchnorm=True needs its layers outside of activation checkpointing.")
        with _Exchange(self.team) if uses_batch and self.team.is_running else nullcontext():
            return self.forward(X)


class _Exchange(TorchFunctionMode):
    """Lets `F.batch_norm` take the whole batch's statistics; what else a layer's class does in `forward` stays."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.team = team

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.batch_norm:
            return _batch_norm(self.team, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _batch_norm(
    team: Team,
    X: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` over the shards of all replicas."""
    if not training:
        return F.batch_norm(X, running_mean, running_var, weight, bias, training, momentum, eps)
    own = (X.numel() // X.size(1), *(_Share.apply(part, len(team.active)) for part in _Moments.apply(X)))
    counts, *moments = zip(*team.exchange(own))
    count = sum(counts)
    if count == 1:  # as torch does
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {X.size()}")
    mine = team.active.index(team.index)
    means, squares = ([copies[mine].to(X.device) for copies in parts] for parts in moments)  # (C,) of every replica
    mean = torch.stack([own * (n / count) for own, n in zip(means, counts)]).sum(0)
    between = [n * (own - mean).square() for own, n in zip(means, counts)]
    var = torch.stack([*squares, *between]).sum(0) / count  # Chan, Golub and LeVeque (1983)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * count / max(count - 1, 1)).to(running_var.dtype), momentum)
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    return _Normalise.apply(X, mean, var, weight, bias, eps)


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
    def backward(ctx: Any, grad_mean: Tensor, grad_squares: Tensor) -> Tensor:
        X, mean = ctx.saved_tensors
        shift = grad_mean * (X.size(1) / X.numel())
        if torch.is_grad_enabled():  # create_graph=True: a gradient of this gradient may follow
            _, shape = _axes(X)
            return ((X - mean.view(shape)) * (2 * grad_squares).view(shape) + shift.view(shape)).to(X.dtype)
        return torch.batch_norm(X, 2 * grad_squares, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, False)


class _Share(torch.autograd.Function):
    """One copy of a replica's moment for each of k replicas.

    Their gradients come back in any order where autograd has a thread a device, and are added in that of the replicas.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, k: int) -> tuple[Tensor, ...]:
        return tuple(part.clone() for _ in range(k))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.stack(grads).sum(0), None


class _Normalise(torch.autograd.Function):
    """`batch_norm` with given mean and variance, differentiated by these, too, in one pass over memory each way."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(X, mean, var, weight)
        ctx.eps = eps
        return torch.batch_norm(X, weight, bias, mean, var, False, 0.0, eps, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        X, mean, var, weight = ctx.saved_tensors
        invstd = torch.rsqrt(var + ctx.eps)
        if torch.is_grad_enabled():
            dims, shape = _axes(X)
            grad_bias = grad.to(mean.dtype).sum(dims)
            grad_weight = (grad * (X - mean.view(shape))).sum(dims) * invstd
            grad_X = (grad * (weight * invstd).view(shape)).to(X.dtype)
        else:
            grad_X, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad, X, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        scale = weight * invstd
        return grad_X, -scale * grad_bias, -0.5 * scale * invstd * grad_weight, grad_weight, grad_bias, None


def _axes(X: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions summed over, and the shape (1, C, 1, ...) of what is left."""
    return [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
