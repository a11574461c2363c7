"""The batch contract: the same global batches in the same order, by any strategy on any devices.

The order depends only on the seed and the epoch. A global batch is cut into k shards, one per
replica, and every process reads the shard of its replica (`lightning_mgpu.distributed.sharding`).

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
    """The order of the samples, in global batches.

    It is a `DistributedSampler`, so that Lightning calls `set_epoch` and injects no other sampler.
    Unlike torch's it repeats no sample. `whole_batches` is for a `ShardLoader`, which cuts them.
    Under other strategies, it yields the shard of process `rank` of `num_replicas` processes.

    Raises:
        ValueError: If there is no sample, or a process would get none of some batch.
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
        """For what the dataset draws."""
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
        # sizes equal up to one: a tiny last batch might have fewer samples than there are processes
        return order.tensor_split(-(-len(order) // self.batch_size))


class SequentialBatchSampler(GlobalBatchSampler, data.SequentialSampler):  # type: ignore[misc]
    """What Lightning's `overfit_batches` takes for a sampler that does not shuffle."""


class BatchLoader(DataLoader):
    """A `DataLoader` that draws its order, and starts its workers, with the first batch.

    By then Lightning has set the epoch, which after a resume it does after `iter`.
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
    """A loader of any dataset with a length, under the batch contract.

    Args:
        dataset: Indexed by sample, as for a `DataLoader`, or a `BatchDataset`.
        batch_size: Samples of a *global* batch, under every strategy and number of devices.
        trainer: The data module's `self.trainer`, which knows the processes that share a batch.
            With None, this process reads whole batches.
        shuffle: Draw a new order every epoch, for training. The default is dataset order.
        seed: For the order, and for what samples draw. The default is `seed_everything`'s.
        drop_last: Leave out a last global batch that is smaller than the others. In `predict`, the
            `trainer` says that nothing is left out: every sample gets a prediction.
        collate_fn: Makes a batch of a list of samples. A `BatchDataset` has no use for it.
        kwargs: Of `DataLoader`. By default, `pin_memory` is on if the trainer's device is a GPU.
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
    kwargs["generator"] = torch.Generator()  # else torch's would lose a number that dropout draws
    return BatchLoader(reader, batch_size=None, sampler=sampler, collate_fn=take_batch, **kwargs)  # type: ignore[arg-type]
