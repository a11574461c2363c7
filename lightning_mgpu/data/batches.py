"""The batch contract: the same global batches in the same order, by any strategy on any devices.

The order depends only on the seed and the epoch. A global batch is cut into k shards, one per
replica, by `torch.tensor_split`, and every process gets the shards of its replicas.

    def train_dataloader(self):  # of your LightningDataModule
        return batch_loader(self.train_set, self.batch_size, self.trainer, shuffle=True)
"""

import copy
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lightning_mgpu.seeds import new_generator, seed_generators
from lightning_mgpu.shards import Shards

BatchIndex = tuple[int, Tensor]
"""The epoch, which augmentation needs, and a vector of sample indices, which make a batch."""


class GlobalBatchSampler(data.DistributedSampler):
    """Yields the shards of process `rank` of `num_replicas` processes, for every global batch.

    It is a `DistributedSampler`, so that Lightning calls `set_epoch` and injects no other sampler.
    Unlike torch's it repeats no sample. `num_shards` replicas share a batch, a multiple of the
    processes. `order_checksum` tells epochs and global orders apart, alike in all processes.
    `num_local` is how many shards a process reads apart: those of its replicas, or all at once.

    Raises:
        ValueError: If a replica, or in evaluation a process, would get no sample of some batch.
    """

    def __init__(
        self,
        indices: Tensor,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        num_replicas: int = 1,
        rank: int = 0,
        num_shards: int = 1,
    ) -> None:
        super().__init__(indices, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.indices, self.batch_size, self.num_shards = indices, batch_size, num_shards
        self.order_checksum, self.num_local = 0, 1
        smallest = min(map(len, self._split(indices))) if batch_size > 0 else 0
        least, unit = (num_shards, "replicas") if shuffle else (num_replicas, "processes")
        if smallest < least:
            raise ValueError(
                f"data.batch_size={batch_size} leaves a global batch of {smallest} of "
                f"{len(indices)} samples, too few for {least} {unit}: choose another batch size."
            )

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        # A generator reads the epoch at its first batch: Lightning sets it after calling `iter`.
        order = torch.arange(len(self.indices))
        if self.shuffle:
            generator = new_generator(self.seed, "order", self.epoch)
            order = torch.randperm(len(order), generator=generator)
        facts = f"{self.seed} {self.epoch} {self.batch_size}".encode()
        self.order_checksum = zlib.crc32(facts + order.numpy().tobytes())
        for batch in self._split(order.to(self.indices.device)):
            # processes share the small batches of an evaluation as evenly as they can
            k = self.num_shards if len(batch) >= self.num_shards else self.num_replicas
            first, end = (rank * k // self.num_replicas for rank in (self.rank, self.rank + 1))
            shards = [*batch.tensor_split(k)[first:end]]
            yield self.epoch, shards if len(shards) == self.num_local else [torch.cat(shards)]

    def __len__(self) -> int:
        return len(self._split(self.indices))

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        if self.shuffle or self.drop_last:
            dropped = len(order) % self.batch_size if self.drop_last else 0
            return order[: len(order) - dropped].split(self.batch_size)
        # sizes equal up to one: a tiny last batch might have fewer samples than there are processes
        return order.tensor_split(max(1, -(-len(order) // self.batch_size)))


class SequentialBatchSampler(GlobalBatchSampler, data.SequentialSampler):  # type: ignore[misc]
    """What Lightning's `overfit_batches` takes for a sampler that does not shuffle."""


class BatchLoader(DataLoader):
    """A `DataLoader` whose sampler yields whole batches: this process's shards of each."""

    @property
    def facts(self) -> dict[str, int]:
        """Checksums that a strategy compares between processes."""
        return {"batches": self.sampler.order_checksum}  # type: ignore[attr-defined]

    def in_shards(self, num_local: int) -> "BatchLoader":
        """A loader of the same batches, as `Shards` if a process has several replicas."""
        loader, sampler = copy.copy(self), copy.copy(self.sampler)
        sampler.num_local = num_local  # type: ignore[attr-defined]
        vars(loader).update(sampler=sampler, _iterator=None)  # DataLoader does not let one set it
        return loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # workers start at the first batch, too: after Lightning has set the epoch
        yield from super().__iter__()


class BatchDataset(Dataset):
    """A dataset that makes a whole batch of a `BatchIndex`.

    What it draws may depend only on the epoch and each sample's index: processes share a batch.
    """


class BatchReader(Dataset):
    """Makes a batch per shard, of any dataset indexed by sample: its samples, collated.

    Before each sample the global generators are seeded by the seed, the epoch and the sample's
    index (30 microseconds), so that it draws the same numbers in any worker and any process.
    Afterwards they are put back. What `collate_fn` draws depends on the last sample of the shard.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable[[list], Any]) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __getitem__(self, index: tuple[int, list[Tensor]]) -> Any:
        epoch, shards = index
        batches = [self._read(epoch, indices) for indices in shards]
        return batches[0] if len(batches) == 1 else Shards(batches)

    def _read(self, epoch: int, indices: Tensor) -> Any:
        if isinstance(self.dataset, BatchDataset):
            return self.dataset[epoch, indices]
        if type(self.dataset) is TensorDataset and self.collate_fn is default_collate:
            # one indexing operation per tensor: far faster than collating
            return [tensor[indices] for tensor in self.dataset.tensors]
        samples = []
        with isolate_rng(include_cuda=False):
            for i in indices.tolist():
                seed_generators(self.seed, "samples", epoch, i, devices=False)
                samples.append(self.dataset[i])
            return self.collate_fn(samples)


def batch_loader(
    dataset: Dataset,
    batch_size: int,
    trainer: Trainer | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list], Any] = default_collate,
    **kwargs: Any,
) -> BatchLoader:
    """A loader of any dataset with a length, under the batch contract.

    Args:
        dataset: Indexed by sample, as for a `DataLoader`, or a `BatchDataset`.
        batch_size: Samples of a *global* batch, under every strategy and number of devices.
        trainer: The data module's `self.trainer`, which knows how many replicas share a batch.
        shuffle: Draw a new order every epoch, for training. The default is dataset order.
        seed: For the order, and for what samples draw. The default is `seed_everything`'s.
        drop_last: Leave out a last global batch that is smaller than the others.
        collate_fn: Makes a batch of a list of samples. A `BatchDataset` has no use for it.
        kwargs: Of `DataLoader`. By default, `pin_memory` is on if the trainer's device is a GPU.
    """
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else [torch.empty(0)]
    indices = torch.arange(len(dataset), device=tensors[0].device)  # type: ignore[arg-type]
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
    share = (1, 0, 1)
    if trainer is not None:
        num_shards = getattr(trainer.strategy, "num_replicas", trainer.world_size)
        share = (trainer.world_size, trainer.global_rank, num_shards)
        shuffle = shuffle and not trainer.overfit_batches  # type: ignore[attr-defined]
        if indices.is_cpu:
            kwargs.setdefault("pin_memory", trainer.strategy.root_device.type not in ("cpu", "mps"))
    new_sampler = GlobalBatchSampler if shuffle else SequentialBatchSampler
    sampler = new_sampler(indices, batch_size, shuffle, seed, drop_last, *share)
    reader = BatchReader(dataset, seed, collate_fn)
    kwargs["generator"] = torch.Generator()  # else torch's would lose a number that dropout draws
    return BatchLoader(reader, batch_size=None, sampler=sampler, **kwargs)
