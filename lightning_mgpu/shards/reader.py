"""A shard is read: its samples, by their indices, and then collated by itself.

What a dataset draws from the global generators belongs to the pass, the batch and the place of the
sample in the global batch. So it is the same in any process, in any worker, for any number of
shards. What `collate_fn` or a dataset's `__getitems__` draws belongs to the shard.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.shards.split_batch import num_samples, shard_sizes


class BatchDataset(Dataset):
    """A dataset that reads all samples of a shard at once, and draws by itself.

    What it draws may depend only on the epoch and each sample's index: replicas share a batch.
    """

    def read(self, epoch: int, indices: Tensor) -> Any:
        """The shard of the samples `indices` (n,)."""
        raise NotImplementedError


class ShardKeys(NamedTuple):
    """A batch sampler yields these in the place of a list of indices."""

    indices: list[list[Any]]  # of each shard
    starts: list[int]  # the place of each shard's first sample in the global batch
    replicas: Sequence[int]  # whose they are
    num_samples: int  # of the global batch
    number: int  # of the batch in its pass
    order: int  # the checksum of all indices of the batch
    seed: int  # of the pass
    epoch: int | None  # for a BatchDataset
    probe: list[Any]  # indices, of which all processes read the first that can be read alone


def cut_indices(
    batch: list[Any],
    num_shards: int,
    replicas: range,
    number: int = 0,
    seed: int = 0,
    epoch: int | None = None,
    has_probe: bool = False,
) -> ShardKeys:
    """The part of some replicas of a global batch, cut as by `torch.tensor_split`.

    Raises:
        ValueError: If a shard would get no sample.
    """
    ends = [0, *accumulate(shard_sizes(len(batch), [1] * num_shards))]
    indices = [batch[ends[i] : ends[i + 1]] for i in replicas]
    order, probe = crc32(repr(batch).encode()), batch if has_probe else []
    starts = [ends[i] for i in replicas]
    return ShardKeys(indices, starts, replicas, len(batch), number, order, seed, epoch, probe)


class Shards:
    """The shards of one process. With several replicas per process, this is what a batch is."""

    def __init__(
        self, shards: Sequence[Any], keys: Any = None, sample: int = 0, has_rows: bool = False
    ) -> None:
        self.shards, self.keys = shards, keys
        self.sample = sample  # a checksum of one, if it is the same each time it is read
        self.has_rows = has_rows  # whether a batch of one sample has one row

    def pin_memory(self) -> "Shards":
        shards = [pin_memory(shard) for shard in self.shards]
        return Shards(shards, self.keys, self.sample, self.has_rows)


def shards_of(batch: Any) -> Sequence[Any]:
    return batch.shards if isinstance(batch, Shards) else [batch]


class ShardReader(Dataset):
    """A dataset for `ShardKeys`. Other attributes are those of the dataset that it reads."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        vars(self).update(read_from=dataset, collate_fn=collate_fn)

    def __getattr__(self, name: str) -> Any:
        if name == "read_from":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.read_from, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.read_from, name, value)

    def __len__(self) -> int:
        return len(self.read_from)

    def __getitem__(self, keys: ShardKeys) -> Shards:
        with isolate_rng(include_cuda=False):
            sample, has_rows = self._probe(keys)
            parts = zip(keys.replicas, keys.starts, keys.indices)
            shards = [self._read(keys, *each) for each in parts]
        return Shards(shards, keys, sample, has_rows)

    __getitems__ = __getitem__  # a DataLoader asks for this one first

    def _probe(self, keys: ShardKeys) -> tuple[int, bool]:
        """What `Shards` has of the first sample that can be read and collated alone."""
        for index in keys.probe:
            try:
                first, again = (self._read(keys, 0, 0, [index]) for _ in range(2))
            except Exception:  # the shard that has the sample raises it
                continue
            try:
                has_rows = num_samples(first) == 1
            except ValueError:
                has_rows = False
            value = checksum(first)
            return value if checksum(again) == value else 0, has_rows
        return 0, False

    def _read(self, keys: ShardKeys, replica: int, start: int, indices: list[Any]) -> Any:
        dataset: Any = self.read_from
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [dataset.indices[i] for i in indices]
        if isinstance(dataset, BatchDataset) and keys.epoch is not None:
            return dataset.read(keys.epoch, torch.as_tensor(indices))
        if type(dataset) is TensorDataset and self.collate_fn is default_collate:
            # one operation per tensor gives the same numbers and strides
            rows = torch.as_tensor(indices)
            tensors = dataset.tensors
            return [X.index_select(0, rows.to(X.device)).contiguous() for X in tensors]
        is_at_once, samples, what = hasattr(dataset, "__getitems__"), [], ""
        try:
            for place, index in enumerate([] if is_at_once else indices, start):
                what = f"It was raised while sample {index} was read."
                seed_generators(keys.seed, "sample", keys.number, place, devices=False)
                samples.append(dataset[index])
            what = (
                f"It was raised by the shard of the samples {indices}, which is collated by itself:"
                " a `collate_fn` that leaves samples out must leave one in each shard."
            )
            seed_generators(keys.seed, "shard", keys.number, replica, devices=False)
            return self.collate_fn(dataset.__getitems__(indices) if is_at_once else samples)
        except Exception as error:
            error.add_note(what)
            raise


def only_shard(shards: Shards) -> Any:
    """The `collate_fn` of a loader that is not in a `ShardLoader`."""
    return shards.shards[0]


def as_read(shards: Shards) -> Shards:
    """The `collate_fn` of the loader in a `ShardLoader`."""
    return shards
