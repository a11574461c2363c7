"""`sync_batchnorm=True` on CPUs, which torch's SyncBatchNorm does not support.

Equivalent to BatchNorm of the global batch on one device (Ioffe and Szegedy, 2015, algorithm 1).
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn

LAYERS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        dist.all_reduce(total := X.clone())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllReduce.apply(gradient)


class SyncedBatchNorm(nn.SyncBatchNorm):
    """Normalizes by mean and variance over the batches of all processes, of any sizes."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        layer: Any = self
        X = input.to(torch.promote_types(input.dtype, torch.float32))
        dims, shape = [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
        i, num_processes = layer.number, dist.get_world_size()
        extras = X.new_tensor([i, i * i, X.numel() / X.size(1)])
        total = _AllReduce.apply(torch.cat([X.sum(dims), extras]))
        mean, n = total[:-3] / total[-1], total[-1].detach()
        if total[-3] ** 2 != num_processes * total[-2]:  # equal if all numbers are
            raise RuntimeError(
                "processes run different BatchNorm layers at the same time (in a random branch?)"
            )
        centered = X - mean.view(shape)
        var = _AllReduce.apply(centered.square().sum(dims)) / n
        if self.training and self.track_running_stats:
            seen = layer.num_batches_tracked.add_(1).item()
            average = 1 / seen if self.momentum is None else self.momentum
            layer.running_mean.lerp_(mean.detach().to(layer.running_mean.dtype), average)
            unbiased = var.detach() * n / (n - 1).clamp(min=1)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), average)
        Y = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            Y = Y * self.weight.view(shape) + self.bias.view(shape)
        return Y.to(input.dtype)


class CPUSyncBatchNorm(LayerSync):
    """Replaces the layers' classes and restores them: checkpoints contain plain layers."""

    def apply(self, model: nn.Module) -> nn.Module:
        self.plain = {x: type(x) for x in model.modules() if isinstance(x, LAYERS)}
        for number, (layer, base) in enumerate(self.plain.items()):
            vars(layer).update(number=number)
            if base not in LAYERS:
                raise MisconfigurationException(f"CPU sync_batchnorm does not support {base}.")
            layer.__class__ = SyncedBatchNorm  # type: ignore[assignment]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for layer, base in self.plain.items():
            layer.__class__ = base
        return model
