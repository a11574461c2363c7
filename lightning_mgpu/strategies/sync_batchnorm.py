"""BatchNorm over the whole batch: replicas exchange mean and variance, as `sync_batchnorm=True` promises.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1, with the batch spread over devices). What
was exchanged stays in the autograd graph, so one backward pass over all replicas' losses gives the full gradient. The
passes over the images themselves are few: torch's own kernels for evaluation, which take mean and variance.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_mgpu.strategies.team import Team


def synchronize_batch_norm(layers: Sequence[_BatchNorm], team: Team) -> None:
    """Let the replicas' copies of one layer normalise with the statistics of the whole batch while they train."""
    for layer in layers:
        vars(layer)["forward"] = _Synchronized(layer, team)  # the class and its keys in checkpoints stay


class _Synchronized:
    """`forward` of a layer while it trains; in copies of the layer, also pickled ones, it is that of the class."""

    def __init__(self, layer: _BatchNorm, team: Team) -> None:
        self.layer, self.team = layer, team

    def __call__(self, X: Tensor) -> Tensor:
        return _forward(self.layer, self.team, X)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.layer).forward, self.layer)


def _forward(layer: _BatchNorm, team: Team, X: Tensor) -> Tensor:
    uses_batch = layer.training or layer.running_mean is None
    if uses_batch and torch._C._current_graph_task_id() != -1:  # replicas cannot meet inside a backward pass
        raise RuntimeError("sync_batchnorm=True needs its layers outside of activation checkpointing.")
    if not uses_batch or not team.is_running:
        return type(layer).forward(layer, X)
    layer._check_input_dim(X)
    own = (X.numel() // X.size(1), *_Moments.apply(X))
    counts, *moments = zip(*team.exchange(own))
    count = sum(counts)
    if layer.training and count == 1:  # as torch does
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {X.size()}")
    means, squares = ([part.to(X.device) for part in parts] for parts in moments)  # (C,) of every replica
    mean = torch.stack([own * (n / count) for own, n in zip(means, counts)]).sum(0)
    between = [n * (own - mean).square() for own, n in zip(means, counts)]
    var = torch.stack([*squares, *between]).sum(0) / count  # Chan, Golub and LeVeque (1983)
    weight = torch.ones_like(mean) if layer.weight is None else layer.weight.to(mean.dtype)
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.to(mean.dtype)

    if layer.training and layer.running_mean is not None:
        assert layer.running_var is not None and layer.num_batches_tracked is not None
        with torch.no_grad():
            layer.num_batches_tracked += 1
            rate = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate)
            layer.running_var.lerp_((var * count / max(count - 1, 1)).to(layer.running_var.dtype), rate)
    return _Normalise.apply(X, mean, var, weight, bias, layer.eps)


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
