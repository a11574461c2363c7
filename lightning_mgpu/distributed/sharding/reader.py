"""A shard is read: its samples, by their indices, and then collated by itself.

What a dataset draws from the global generators belongs to the pass, the batch and the place of the
sample in the global batch. So it is the same in any process, in any worker, for any number of
shards. What `collate_fn` or a dataset's `__getitems__` draws belongs to the shard.
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
    """A dataset that reads all samples of a shard at once, and draws by itself.

    What it draws may depend only on the epoch and each sample's index: replicas share a batch.
    """

    def read(self, epoch: int, indices: Tensor) -> Any:
        """The shard of the samples `indices` (n,)."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("this dataset reads whole shards: give it to batch_loader")


class ShardIndices(NamedTuple):
    """A batch sampler yields these instead of a list of indices."""

    samples: list[Any]  # the indices of the shard's samples in the dataset
    start: int  # the position of the shard's first sample in the global batch
    replica: int
    num_samples: int  # of the global batch
    order: int  # the checksum of all indices of the batch
    number: int = 0  # of the batch in its pass
    seed: int = 0  # of the pass
    epoch: int | None = None  # for a BatchDataset
    probe: Sequence[Any] = ()  # all processes read the first of these that can be read alone


def cut_indices(batch: list[Any], num_shards: int, replica: int, *epoch_key: Any) -> ShardIndices:
    """One replica's shard of a global batch, cut as by `torch.tensor_split`.

    `epoch_key` contains the last fields of `ShardIndices`.

    Raises:
        ValueError: If a shard would get no sample.
    """
    ends = [0, *accumulate(shard_sizes(len(batch), [1] * num_shards))]
    start, end = ends[replica : replica + 2]
    order = crc32(repr(batch).encode())
    return ShardIndices(batch[start:end], start, replica, len(batch), order, *epoch_key)


class Probe(NamedTuple):
    """Facts from the first sample of a loader, read and collated by itself."""

    checksum: int  # 0 if it is another one when the sample is read again
    has_one_row: bool


class Shard:
    """A process's part of a batch, with its indices: what a loop gets from a loader.

    A strategy hands on the batch. The probe is of the first batch of a loader.
    """

    invariants: dict[str, int] | None = None  # of the epoch so far, identical in all processes
    has_rows = False  # whether a batch has one row per sample

    def __init__(self, batch: Any, indices: ShardIndices, probe: Probe | None = None) -> None:
        self.batch, self.indices, self.probe = batch, indices, probe

    def pin_memory(self) -> "Shard":
        self.batch = pin_memory(self.batch)
        return self


class ShardReader(Dataset):
    """A dataset for `ShardIndices`. Other attributes are those of the dataset that it reads."""

    read_from: Any = None  # while a copy is made

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

    __getitems__ = __getitem__  # a DataLoader asks for this one first

    def _probe(self, indices: ShardIndices) -> Probe | None:
        """Of the first sample that can be read and collated alone."""
        for index in indices.probe:
            with suppress(Exception):  # the shard that has the sample raises it
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
            # one operation per tensor gives the same numbers and strides
            rows = torch.as_tensor(samples)
            return [X.index_select(0, rows.to(X.device)).contiguous() for X in dataset.tensors]
        is_at_once, items = hasattr(dataset, "__getitems__"), []
        for place, index in enumerate([] if is_at_once else samples, start):
            seed_generators(indices.seed, "sample", indices.number, place, devices=False)
            items.append(dataset[index])
        seed_generators(indices.seed, "shard", indices.number, replica, devices=False)
        return self.collate_fn(dataset.__getitems__(samples) if is_at_once else items)


def take_batch(shard: Shard) -> Any:
    """The `collate_fn` of a loader that is not in a `ShardLoader`."""
    return shard.batch
