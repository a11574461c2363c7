"""Each process gets its part of every batch, whatever the loader is.

Every process reads whole batches, so that any sampler and any dataset is right. P processes read
P times as much for it; `lightning_mgpu.data.batch_loader` reads only its part.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.strategies.split_batch import ARRAYS, cut, leaves, num_samples


class SlicedLoader:
    """A loader of parts. Its dataset, sampler, length and state are those of the whole one.

    Args:
        part: The numbers of samples before, in and after the part, of a batch of n samples.
        begin: Called before each pass.
    """

    def __init__(
        self, loader: Any, part: Callable[[int], Sequence[int]], begin: Callable[[], None]
    ) -> None:
        self.loader, self.part, self.begin = loader, part, begin
        self.order_checksum = 0  # of all batches so far; all processes must have the same

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        is_empty, index = True, -1
        for index, batch in enumerate(self.loader):
            self.order_checksum = zlib.crc32(excerpt(batch), self.order_checksum)
            before, size, after = self.part(num_samples(batch))
            # the indices of each batch that Lightning notes for `predict`
            sampler = getattr(self.loader, "batch_sampler", None)
            if seen := getattr(sampler, "seen_batch_indices", None):
                seen[index] = seen[index][before : before + size]
            if size:
                is_empty = False
                yield cut(batch, [before, size, after])[1]
        if is_empty and index >= 0:
            raise ValueError("This set has fewer samples than there are processes.")


def excerpt(batch: Any) -> bytes:
    """Some numbers of every tensor: they differ between batches of other samples or order."""
    arrays = [torch.as_tensor(part) for part in leaves(batch) if isinstance(part, ARRAYS)]
    flat = [array.detach().reshape(-1)[:: max(1, array.numel() // 64)] for array in arrays]
    return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in flat)


def get_random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002


def set_random_states(states: tuple[Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    random.setstate(states[2])
