"""Each process gets its part of every batch, whatever the loader is.

Every process reads whole batches, so that any sampler and dataset is right, and P processes read P
times as much. `lightning_mgpu.data.batch_loader` reads only its part.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

from lightning_mgpu.strategies.split_batch import ARRAYS, cut, leaves, num_samples


class SlicedLoader:
    """A loader of parts. Its dataset, sampler, length and state are those of the whole one."""

    def __init__(self, loader: Any, strategy: Any) -> None:
        self.loader, self.strategy = loader, strategy
        self.order_checksum = 0  # of all batches so far; all processes must have the same
        if hasattr(loader, "state_dict"):  # Lightning looks among an instance's attributes
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # the loader's sampler draws what it would draw on one device
        _set_rng_states(self.strategy.broadcast(_collect_rng_states(include_cuda=False)))
        return self._parts(iter(self.loader))  # now, not at the first batch: `iter` may draw a seed

    def _parts(self, batches: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            self.order_checksum = zlib.crc32(excerpt(batch), self.order_checksum)
            before, size, after = self.strategy.part_of(num_samples(batch))
            # the indices of each batch that Lightning notes for `predict`
            sampler = getattr(self.loader, "batch_sampler", None)
            if seen := getattr(sampler, "seen_batch_indices", None):
                seen[index] = seen[index][before : before + size]
            yield cut(batch, [before, size, after])[1]


def excerpt(batch: Any) -> bytes:
    """Some numbers of every tensor: they differ between batches of other samples or order."""
    arrays = [torch.as_tensor(part) for part in leaves(batch) if isinstance(part, ARRAYS)]
    flat = [array.detach().reshape(-1)[:: max(1, array.numel() // 64)] for array in arrays]
    return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in flat)
