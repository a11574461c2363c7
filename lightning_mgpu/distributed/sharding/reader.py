"""Reads the samples of a shard by index, and collates them separately.

The global RNGs are seeded per pass, batch and sample position in the global batch. So the random
numbers of a dataset do not depend on the process, the worker or the number of shards. For
`collate_fn` and a dataset's `__getitems__`, they are seeded per shard.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.distributed.sharding.split_batch import num_samples, shard_sizes
from lightning_mgpu.seeds import seed_generators


class BatchDataset(Dataset):
    """A dataset that reads all samples of a shard at once, with its own RNG.

    Random numbers may depend only on the epoch and each sample's index: replicas share a batch.
    """

    def read(self, epoch: int, indices: Tensor) -> Any:
        """Return the collated samples `indices` (n,)."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("this dataset reads whole shards: use it with batch_loader")


class ShardIndices(NamedTuple):
    """The indices of a shard, which a batch sampler yields instead of a list."""

    samples: list[Any]  # the indices of the shard's samples in the dataset
    start: int  # the position of the shard's first sample in the global batch
    replica: int
    num_samples: int  # in the global batch
    order: int  # the checksum of all indices of the batch
    number: int = 0  # of the batch in its pass
    seed: int = 0  # of the pass
    epoch: int | None = None  # for a BatchDataset
    probe: Sequence[Any] = ()  # all processes read the first readable sample of these


def cut_indices(batch: list[Any], num_shards: int, replica: int, *epoch_key: Any) -> ShardIndices:
    """One replica's shard of a global batch, cut as by `torch.tensor_split`.

    `epoch_key` contains the remaining fields of `ShardIndices`.

    Raises:
        ValueError: If a shard would be empty.
    """
    ends = [0, *accumulate(shard_sizes(len(batch), [1] * num_shards))]
    start, end = ends[replica : replica + 2]
    order = crc32(repr(batch).encode())
    return ShardIndices(batch[start:end], start, replica, len(batch), order, *epoch_key)


class Probe(NamedTuple):
    """Properties of the first sample of a loader, read and collated separately."""

    checksum: int  # 0 if it changes when the sample is read again
    has_one_row: bool


class Shard:
    """A process's part of a batch with its indices, as a loop receives it from a loader.

    The strategy unwraps the batch. The first batch of a loader contains a probe.
    """

    invariants: dict[str, int] | None = None  # of the epoch so far, identical in all processes
    has_rows = False  # whether a batch has one row per sample

    def __init__(self, batch: Any, indices: ShardIndices, probe: Probe | None = None) -> None:
        self.batch, self.indices, self.probe = batch, indices, probe

    def pin_memory(self) -> "Shard":
        self.batch = pin_memory(self.batch)
        return self


class ShardReader(Dataset):
    """Wraps a dataset to read `ShardIndices`. Other attributes are the dataset's."""

    read_from: Any = None  # while it is copied

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        vars(self).update(read_from=dataset, collate_fn=collate_fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read_from, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.read_from, name, value)

    def __len__(self) -> int:
        return len(self.read_from)

    def __getitem__(self, indices: ShardIndices) -> Shard:
        with isolate_rng(include_cuda=False):
            probe = self._probe(indices)
            batch = self._read(indices, indices.replica, indices.start, indices.samples)
        return Shard(batch, indices, probe)

    __getitems__ = __getitem__  # DataLoader prefers this method

    def _probe(self, indices: ShardIndices) -> Probe | None:
        """Probe the first sample that can be read and collated."""
        for index in indices.probe:
            with suppress(Exception):  # raised again when its shard is read
                first, again = (self._read(indices, 0, 0, [index]) for _ in range(2))
                sample = checksum(first) if checksum(first) == checksum(again) else 0
                has_one_row = False
                with suppress(ValueError):
                    has_one_row = num_samples(first) == 1
                return Probe(sample, has_one_row)
        return None

    def _read(self, indices: ShardIndices, replica: int, start: int, samples: list[Any]) -> Any:
        dataset: Any = self.read_from
        while type(dataset) is Subset:
            dataset, samples = dataset.dataset, [dataset.indices[i] for i in samples]
        if isinstance(dataset, BatchDataset) and indices.epoch is not None:
            return dataset.read(indices.epoch, torch.as_tensor(samples))
        if type(dataset) is TensorDataset and self.collate_fn is default_collate:
            # one operation per tensor, with the same values and strides
            rows = torch.as_tensor(samples)
            return [X.index_select(0, rows.to(X.device)).contiguous() for X in dataset.tensors]
        is_at_once, items = hasattr(dataset, "__getitems__"), []
        for place, index in enumerate([] if is_at_once else samples, start):
            seed_generators(indices.seed, "sample", indices.number, place, devices=False)
            items.append(dataset[index])
        seed_generators(indices.seed, "shard", indices.number, replica, devices=False)
        return self.collate_fn(dataset.__getitems__(samples) if is_at_once else items)


def take_batch(shard: Shard) -> Any:
    """The `collate_fn` of a loader without a `ShardLoader`."""
    return shard.batch
