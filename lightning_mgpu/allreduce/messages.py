"""Many tensors from device to device in few messages: those of one dtype travel in flat tensors."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's: larger ones gain nothing, and take memory


def buckets(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterator[list[int]]:
    """The tensors' indices of each message: one dtype, up to `BUCKET_BYTES`, one device to another.

    A tensor that is not dense, such as a sparse buffer, is a message of its own.
    """
    alike: dict[tuple[torch.dtype, torch.device, torch.device], list[int]] = defaultdict(list)
    for i, (target, source) in enumerate(zip(targets, sources)):
        if source.layout != torch.strided:
            yield [i]
        else:
            alike[source.dtype, source.device, target.device].append(i)
    for indices in alike.values():
        bucket: list[int] = []
        num_bytes = 0
        for i in indices:
            num_bytes += sources[i].nbytes
            if bucket and num_bytes > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], sources[i].nbytes
            bucket.append(i)
        yield bucket


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
    """Copy each source into the target at its place."""
    for bucket in buckets(targets, sources):
        into = [targets[i] for i in bucket]
        torch._foreach_copy_(into, on_device([sources[i] for i in bucket], into[0].device))


@torch.no_grad()
def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor], alpha: float = 1) -> None:
    """Add each source, times `alpha`, to the target at its place."""
    for bucket in buckets(targets, sources):
        into = [targets[i] for i in bucket]
        torch._foreach_add_(
            into, on_device([sources[i] for i in bucket], into[0].device), alpha=alpha
        )
