"""BatchNorm over the whole batch: replicas exchange mean and variance (`sync_batchnorm=True`).

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1, with the batch spread
over devices). The exchanged tensors stay in the autograd graph, so one backward pass over all
losses gives the whole gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.replicas import Replicas

torch_batch_norm = F.batch_norm


@contextmanager
def synchronized_batch_norm(lockstep: Lockstep, replicas: Replicas) -> Iterator[None]:
    """Inside the block BatchNorm layers, by `F.batch_norm`, take the whole batch's statistics."""
    sets = [*replicas.parameter_sets.items(), *replicas.buffer_sets.items()]
    path_of = {id(tensor): path for path, tensors in sets for tensor in tensors}

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
        args = running_mean, running_var, weight, bias, training, momentum, eps
        if not training or lockstep.running is None:
            return torch_batch_norm(X, *args)
        dims, shape = [dim for dim in range(X.ndim) if dim != 1], [1, -1] + [1] * (X.ndim - 2)
        Z = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
        shard_mean = Z.mean(dims) if len(Z) else Z.sum(dims)  # (C,): 0 of no samples
        spread = (Z - shard_mean.view(shape)).square().sum(dims)  # two passes: no cancellation
        paths = [path_of[id(each)] for each in (weight, running_mean) if id(each) in path_of]
        name = " ".join(["BatchNorm", *paths])  # replicas meet in one layer only
        offered = lockstep.exchange(name, (shard_mean, spread), X.numel() // X.size(1))
        means, squares, counts = zip(*offered)
        if (total := sum(counts)) < 2:
            return torch_batch_norm(X, *args)  # of no values; torch refuses a single one
        mean = torch.stack([each * (n / total) for each, n in zip(means, counts)]).sum(0)
        between = [n * (each - mean).square() for each, n in zip(means, counts)]
        var = torch.stack([*squares, *between]).sum(0) / total  # Chan, Golub and LeVeque (1983)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
        scale = torch.rsqrt(var + eps) if weight is None else torch.rsqrt(var + eps) * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return torch.addcmul(shift.view(shape), Z, scale.view(shape)).to(X.dtype)

    with patch.object(F, "batch_norm", batch_norm):
        yield
