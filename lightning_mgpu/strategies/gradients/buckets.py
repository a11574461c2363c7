"""Reduce gradients one by one, or packed into flat buckets: fewer, larger messages for two more copies."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_mgpu.allreduce import allreduce_many


def reduce_in_buckets(
    allreduce: Callable[[list[Tensor]], None], gradients: Sequence[list[Tensor]], bucket_bytes: int
) -> None:
    """Sum gradients over devices in place.

    Args:
        allreduce: Leaves the sum of k tensors, one a device, in each of them.
        gradients: For every parameter its k gradients, one a device.
        bucket_bytes: Size of a bucket; 0 calls `allreduce` once a parameter, or its `many` once for all.
    """
    if bucket_bytes == 0:
        allreduce_many(allreduce, [list(tensors) for tensors in gradients])
        return
    bucket: list[list[Tensor]] = []
    size = 0
    for tensors in gradients:
        if bucket and (size + tensors[0].nbytes > bucket_bytes or tensors[0].dtype != bucket[0][0].dtype):
            _reduce_bucket(allreduce, bucket)
            bucket, size = [], 0
        bucket.append(tensors)
        size += tensors[0].nbytes
    if bucket:
        _reduce_bucket(allreduce, bucket)


def _reduce_bucket(allreduce: Callable[[list[Tensor]], None], bucket: list[list[Tensor]]) -> None:
    per_device = list(zip(*bucket))  # k tuples of all the bucket's gradients
    flat = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in per_device]
    allreduce(list(flat))  # it may make it shorter
    for tensors, buffer in zip(per_device, flat):
        for tensor, part in zip(tensors, buffer.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view(tensor.shape))
