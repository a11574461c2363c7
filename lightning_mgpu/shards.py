"""A batch is read shard by shard. Whose a sample is, is decided by its index, before it is read."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_mgpu.seeds import seed_generators


class Shards:
    """The shards of one process. With several replicas per process, this is what a batch is."""

    def __init__(
        self, shards: Sequence[Any], indices: Sequence[Any] = (), order: int = 0, sample: int = 0
    ) -> None:
        self.shards, self.indices = shards, indices
        self.order, self.sample = order, sample  # checksums that all processes compare

    def pin_memory(self) -> "Shards":
        shards = [pin_memory(shard) for shard in self.shards]
        return Shards(shards, self.indices, self.order, self.sample)


class ShardKeys(NamedTuple):
    """A batch sampler yields these in the place of a list of indices."""

    indices: list[list[Any]]  # of each shard
    replicas: Sequence[int]  # whose they are
    number: int  # of the batch in its pass
    order: int  # the checksum of all indices of the batch
    seed: int  # of the pass
    probe: list[Any]  # an index whose sample is the same in all processes, or none


class ShardReader:
    """A dataset for `ShardKeys`. Other attributes are those of the dataset it reads.

    The dataset and `collate_fn` draw from a stream for each pass, batch and replica, which is the
    same in any process and any worker.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        vars(self).update(read_from=dataset, collate_fn=collate_fn)

    def __getattr__(self, name: str) -> Any:
        if name == "read_from":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.read_from, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.read_from, name, value)

    def __getitems__(self, keys: ShardKeys) -> Shards:
        with isolate_rng(include_cuda=False):
            # read twice, if this is the first batch
            seen = {checksum(self._read(keys, 0, keys.probe)) for _ in keys.probe * 2}
            shards = [self._read(keys, *each) for each in zip(keys.replicas, keys.indices)]
        sample = seen.pop() if len(seen) == 1 else 0  # another one each time it is read
        return Shards(shards, keys.indices, keys.order, sample)

    def _read(self, keys: ShardKeys, replica: int, indices: list[Any]) -> Any:
        """The samples, collated."""
        seed_generators(keys.seed, "read", keys.number, replica, devices=False)
        read = getattr(self.read_from, "__getitems__", None)  # as torch's DataLoader does
        samples = read(indices) if read else [self.read_from[index] for index in indices]
        return self.collate_fn(samples)


def as_read(shards: Shards) -> Shards:
    """The `collate_fn` of a loader whose dataset is a `ShardReader`."""
    return shards


def checksum(part: Any) -> int:
    """A checksum of everything in a batch, a sample or a tensor."""
    return crc32(excerpt(part, sys.maxsize))


def excerpt(part: Any, most: int = 4096) -> bytes:
    """About `most` numbers of every array, and all text; of anything else, its type."""
    if isinstance(part, np.ndarray) or (isinstance(part, Tensor) and is_dense(part)):
        values: Any = part.reshape(-1)
        step = max(1, len(values) // most)
        while math.gcd(step, len(values)) > 1:  # else it could always meet the same column
            step += 1
        values = values[::step]
        if isinstance(values, Tensor):
            return values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return excerpt(values.tolist()) if values.dtype.hasobject else values.tobytes()
    if isinstance(part, (Mapping, list, tuple)):
        parts = part.values() if isinstance(part, Mapping) else part
        return b"".join(excerpt(each, most) for each in parts)
    is_plain = isinstance(part, (np.generic, str, bytes, int, float, complex, type(None)))
    return repr(part if is_plain else type(part)).encode()


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
