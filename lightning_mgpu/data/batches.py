"""The batch contract: identical global batches in the same order on any strategy and devices.

The order depends only on seed and epoch. A global batch is split into k shards, one per replica,
and every process reads only its shard (`lightning_mgpu.distributed.sharding`).

    def train_dataloader(self):  # of your LightningDataModule
        return batch_loader(self.train_set, self.batch_size, self.trainer, shuffle=True)
"""

import os
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_mgpu.distributed.sharding.reader import (
    ShardIndices,
    ShardReader,
    cut_indices,
    take_batch,
)
from lightning_mgpu.seeds import new_generator


class GlobalBatchSampler(data.DistributedSampler):
    """Yields the shards of global batches for process `rank` of `num_replicas` processes.

    It is a `DistributedSampler`, so that Lightning calls `set_epoch` and does not replace it.
    Unlike torch's, it never repeats a sample. `ShardLoader` splits `whole_batches` itself.

    Raises:
        ValueError: If there are no samples, or if a process would get an empty shard.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"{num_samples} samples in batches of {batch_size}: nothing to read.")
        super().__init__(range(num_samples), num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.sizes = [*map(len, self._split(torch.arange(num_samples)))]
        self.smallest_batch = min(self.sizes)
        if self.smallest_batch < num_replicas:
            few = f"data.batch_size={batch_size} leaves a batch of only {self.smallest_batch}"
            raise ValueError(f"{few} of {num_samples} samples for {num_replicas} processes.")

    @property
    def pass_seed(self) -> int:
        """The seed of the dataset's random augmentation in this epoch."""
        return crc32(repr((self.seed, self.epoch)).encode())

    def whole_batches(self) -> Iterator[list[int]]:
        order = torch.arange(len(self.dataset))  # type: ignore[arg-type]
        if self.shuffle:
            generator = new_generator(self.seed, "order", self.epoch)
            order = torch.randperm(len(order), generator=generator)
        return map(Tensor.tolist, self._split(order))

    def __iter__(self) -> Iterator[ShardIndices]:
        self.seen_batch_indices: list[list[int]] = []
        for number, batch in enumerate(self.whole_batches()):
            epoch_key = number, self.pass_seed, self.epoch
            indices = cut_indices(batch, self.num_replicas, self.rank, *epoch_key)
            self.seen_batch_indices.append(indices.samples)
            yield indices

    def __len__(self) -> int:
        return len(self.sizes)

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        if self.shuffle or self.drop_last:
            dropped = len(order) % self.batch_size if self.drop_last else 0
            return order[: len(order) - dropped].split(self.batch_size)
        # sizes differ by at most 1: a small last batch might have fewer samples than processes
        return order.tensor_split(-(-len(order) // self.batch_size))


class SequentialBatchSampler(GlobalBatchSampler, data.SequentialSampler):  # type: ignore[misc]
    """Recognized by Lightning's `overfit_batches` as a sampler without shuffling."""


class BatchLoader(DataLoader):
    """A `DataLoader` that samples its order and starts its workers at the first batch.

    After a resume, Lightning calls `set_epoch` only after `iter`.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


def batch_loader(
    dataset: Dataset,
    batch_size: int,
    trainer: Trainer | None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list], Any] = default_collate,
    **kwargs: Any,
) -> DataLoader:
    """A `DataLoader` of global batches for any map-style dataset.

    Args:
        dataset: Indexed by sample, as for a `DataLoader`, or a `BatchDataset`.
        batch_size: Global batch size, independent of strategy and number of devices.
        trainer: The data module's `self.trainer`, which defines the processes that share a batch.
            With None, this process reads whole batches.
        shuffle: Shuffle in every epoch, for training. Default: dataset order.
        seed: Seed of shuffling and of augmentation. Default: `seed_everything`.
        drop_last: Drop a smaller last batch. Ignored by `predict`: every sample gets a prediction.
        collate_fn: Collates a list of samples to a batch. Not used for a `BatchDataset`.
        kwargs: Passed to `DataLoader`. `pin_memory` defaults to True if the device is a GPU.
    """
    share = (1, 0)
    if trainer is not None:
        share = trainer.world_size, trainer.global_rank
        shuffle = shuffle and not trainer.overfit_batches  # type: ignore[attr-defined]
        drop_last = drop_last and not trainer.predicting
        first: Any = dataset.tensors[0] if isinstance(dataset, TensorDataset) else dataset
        if getattr(first, "device", torch.device("cpu")).type == "cpu":
            kwargs.setdefault("pin_memory", trainer.strategy.root_device.type not in ("cpu", "mps"))
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
    num: int = len(dataset)  # type: ignore[arg-type]
    new_sampler = GlobalBatchSampler if shuffle else SequentialBatchSampler
    sampler = new_sampler(num, batch_size, shuffle, seed, drop_last, *share)
    reader = ShardReader(dataset, collate_fn)
    kwargs["generator"] = torch.Generator()  # keeps the global one, which dropout uses, unchanged
    return BatchLoader(reader, batch_size=None, sampler=sampler, collate_fn=take_batch, **kwargs)  # type: ignore[arg-type]
