"""BatchNorm over the whole batch on CPUs (`sync_batchnorm=True`): torch's layer refuses them.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1). The processes
exchange sums, and in the backward pass autograd exchanges their gradients.
"""

from typing import Any

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

LAYERS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


class SyncedBatchNorm(nn.BatchNorm1d):
    """Takes mean and variance over the batches of all processes, which may differ in size."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        X = input.to(torch.promote_types(input.dtype, torch.float32))
        dims, shape = [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
        count = X.new_full((1,), X.numel() / X.size(1))
        total = all_reduce(torch.cat([X.sum(dims), count]))
        mean, n = total[:-1] / total[-1], total[-1].detach()
        centered = X - mean.view(shape)
        var = all_reduce(centered.square().sum(dims)) / n
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), var.detach() * n / (n - 1).clamp(min=1))
        Y = centered * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            Y = Y * self.weight.view(shape) + self.bias.view(shape)
        return Y.to(input.dtype)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        buffers: Any = self
        buffers.num_batches_tracked.add_(1)
        momentum = self.momentum or 1 / buffers.num_batches_tracked.item()
        buffers.running_mean.lerp_(mean.to(buffers.running_mean.dtype), momentum)
        buffers.running_var.lerp_(var.to(buffers.running_var.dtype), momentum)

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # a layer of any dimensionality


class CPUSyncBatchNorm(LayerSync):
    """Exchanges the layers' classes, and puts them back: checkpoints have the plain layers."""

    def apply(self, model: nn.Module) -> nn.Module:
        self.plain = {layer: type(layer) for layer in model.modules() if type(layer) in LAYERS}
        for layer in self.plain:
            layer.__class__ = SyncedBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for layer, plain_class in self.plain.items():
            layer.__class__ = plain_class
        return model
