"""BatchNorm over the whole batch on CPUs (`sync_batchnorm=True`): torch's layer refuses them.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1): processes exchange
sums, and autograd exchanges their gradients in the backward pass.
"""

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from typing_extensions import override


class SyncedBatchNorm(nn.BatchNorm1d):
    """Takes mean and variance over the batches of all processes, which may differ in size."""

    plain_class: type[nn.Module]

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        X = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims, shape = [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
        count = X.new_full((1,), X.numel() / X.size(1))
        *total, n = all_reduce(torch.cat([X.sum(dims), count])).split([X.size(1), 1])
        mean = total[0] / n
        centered = X - mean.view(shape)  # two passes: no cancellation
        var = all_reduce(centered.square().sum(dims)) / n
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = self.momentum
                if momentum is None:  # a cumulative average
                    momentum = 1 / self.num_batches_tracked.item()
                unbiased = var * n / (n - 1).clamp(min=1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        Y = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            Y = Y * self.weight.view(shape) + self.bias.view(shape)
        return Y.to(input.dtype)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        pass  # as the plain layer's


class CPUSyncBatchNorm(LayerSync):
    """Exchanges the layers' classes and puts them back, so that checkpoints have plain layers."""

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                module.plain_class = type(module)
                module.__class__ = SyncedBatchNorm
        return model

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, SyncedBatchNorm):
                module.__class__ = module.__dict__.pop("plain_class")
        return model
