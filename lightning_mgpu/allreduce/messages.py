"""Many tensors from one device to another in few messages: neighbours travel in one flat tensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's: larger ones gain nothing, and take memory


def buckets(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Cut a list where a message ends: at another dtype or device, or after `BUCKET_BYTES`."""
    start, num_bytes = 0, 0
    for i, tensor in enumerate(tensors):
        first = tensors[start]
        is_alike = (tensor.dtype, tensor.device) == (first.dtype, first.device)
        if i > start and not (is_alike and num_bytes + tensor.nbytes <= BUCKET_BYTES):
            yield slice(start, i)
            start, num_bytes = i, 0
        num_bytes += tensor.nbytes
    if tensors:
        yield slice(start, len(tensors))


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors of one bucket on a device: they themselves if they are there, else copies."""
    if tensors[0].device == device:
        return list(tensors)
    if len(tensors) == 1:
        return [tensors[0].to(device)]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target at its place. The targets are on one device."""
    for part in buckets(sources):
        torch._foreach_copy_(targets[part], on_device(sources[part], targets[part.start].device))


@torch.no_grad()
def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor], alpha: float = 1) -> None:
    """Add each source, times `alpha`, to the target at its place. The targets are on one device."""
    for part in buckets(sources):
        moved = on_device(sources[part], targets[part.start].device)
        torch._foreach_add_(targets[part], moved, alpha=alpha)
