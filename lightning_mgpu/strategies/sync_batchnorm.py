"""BatchNorm over the whole batch: replicas exchange their sums, as `sync_batchnorm=True` promises.

Equal to one device with the full batch (Ioffe and Szegedy, 2015, algorithm 1, with the batch spread over devices). The
exchanged sums stay in the autograd graph, so one backward pass over all replicas' losses gives the full gradient.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_mgpu.strategies.team import Team


def synchronize_batch_norm(layers: Sequence[_BatchNorm], team: Team) -> None:
    """Let the replicas' copies of one layer normalise with the statistics of the whole batch while they train."""
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, team)  # the class and its keys in checkpoints stay


def _forward(layer: _BatchNorm, team: Team, X: Tensor) -> Tensor:
    uses_batch = layer.training or layer.running_mean is None
    if uses_batch and torch._C._current_graph_task_id() != -1:  # replicas cannot meet inside a backward pass
        raise RuntimeError("sync_batchnorm=True needs its layers outside of activation checkpointing.")
    if not uses_batch or not team.is_running:
        return type(layer).forward(layer, X)
    layer._check_input_dim(X)
    dims = [dim for dim in range(X.ndim) if dim != 1]
    shape = [1, -1] + [1] * (X.ndim - 2)
    Z = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X

    sums, counts = zip(*team.exchange((Z.sum(dims), Z.numel() // Z.size(1))))
    count = sum(counts)
    if layer.training and count == 1:  # as torch does
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {X.size()}")
    mean = _total(sums, Z) / count  # (C,)
    centred = Z - mean.view(shape)
    var = _total(team.exchange(centred.square().sum(dims)), Z) / count  # (C,), two passes: no cancellation
    Z = centred * torch.rsqrt(var + layer.eps).view(shape)
    if layer.weight is not None and layer.bias is not None:
        Z = Z * layer.weight.view(shape) + layer.bias.view(shape)

    if layer.training and layer.running_mean is not None:
        assert layer.running_var is not None and layer.num_batches_tracked is not None
        with torch.no_grad():
            layer.num_batches_tracked += 1
            rate = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate)
            layer.running_var.lerp_((var * count / max(count - 1, 1)).to(layer.running_var.dtype), rate)
    return Z.to(X.dtype)


def _total(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([part.to(like.device) for part in parts]).sum(0)
