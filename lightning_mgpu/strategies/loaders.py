"""Each process gets its slice of every batch, whatever the loader is.

Every process reads whole batches, so that any sampler and any dataset is right. P processes read
P times as much for it; `lightning_mgpu.data.batch_loader` reads only the slice.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.strategies.split_batch import ARRAYS, cut, leaves, num_samples, shard_sizes


class SlicedLoader:
    """Hands out the shards `first` to `last - 1` of k of every batch, in one piece.

    What else there is to a loader (dataset, sampler, length, state) is that of the whole one.

    Args:
        check_size: Called with the number of samples of every batch.
        before: Called at the start of each pass.
    """

    def __init__(
        self,
        loader: Any,
        shards: tuple[int, int],
        k: int,
        check_size: Callable[[int], None],
        before: Callable[[], None],
    ) -> None:
        self.loader, self.shards, self.k = loader, shards, k
        self.check_size, self.before = check_size, before
        self.order_checksum = 0  # of all batches so far; other processes must have the same

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.before()
        num_given, index = 0, -1
        for index, batch in enumerate(self.loader):
            self.order_checksum = zlib.crc32(excerpt(batch), self.order_checksum)
            self.check_size(n := num_samples(batch))
            first, last = self.shards
            sizes = shard_sizes(n, [1] * self.k)
            sizes = [sum(sizes[:first]), sum(sizes[first:last]), sum(sizes[last:])]
            # the indices that Lightning notes for `predict`, batch by batch
            sampler = getattr(self.loader, "batch_sampler", None)
            if seen := getattr(sampler, "seen_batch_indices", None):
                seen[index] = seen[index][sizes[0] : sizes[0] + sizes[1]]
            if sizes[1]:
                num_given += 1
                yield cut(batch, sizes)[1]
        if index >= 0 and not num_given:
            raise ValueError(
                f"A set of {n} samples has none for each of the processes: give it more samples, "
                "or use fewer devices."
            )


def excerpt(batch: Any) -> bytes:
    """Some numbers of every tensor: they differ between batches of other samples or order."""
    arrays = [torch.as_tensor(part) for part in leaves(batch) if isinstance(part, ARRAYS)]
    flat = [array.detach().reshape(-1)[:: max(1, array.numel() // 64)] for array in arrays]
    return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in flat)


def random_states() -> tuple[Any, ...]:
    """The states of torch's, numpy's and Python's global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_states(states: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
