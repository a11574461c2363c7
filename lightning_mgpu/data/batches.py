"""The batch contract: the same global batches in the same order, by any strategy on any devices.

`GlobalBatchSampler` splits the dataset into global batches. Their order depends on the seed and the
epoch alone. Every process of a multi-process strategy gets its slice of each batch. A single
process gets the whole batch, and a single-process strategy splits it over its replicas by the same
rule (`torch.tensor_split`, unless its `split` says otherwise). `BatchLoader` is a `DataLoader` that
fetches a whole batch in one indexing operation and can be resumed in the middle of an epoch.
`batch_loader` puts them together for any dataset:

    def train_dataloader(self):  # of your LightningDataModule
        return batch_loader(self.train_set, self.batch_size, self.trainer, shuffle=True)
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from lightning_mgpu.seeds import new_generator, seed_generators, stream

BatchIndex = tuple[int, Tensor]
"""The epoch and a vector of sample indices: a sampler yields it, a dataset is indexed with it.

Augmentation needs the epoch. It travels with the indices because the copies of a dataset in a
DataLoader's workers do not see `set_epoch`."""

Collate = Callable[[list[Any]], Any]


class GlobalBatchSampler(DistributedSampler):
    """Yields the `BatchIndex` of every global batch: the slice of process `rank` of `num_replicas`.

    It is a `DistributedSampler`, so that Lightning calls `set_epoch` and injects no other sampler.
    Unlike torch's it repeats no sample.

    Args:
        indices: The samples to visit, a vector, on the device that batches are gathered on.
        batch_size: Samples of a *global* batch.
        num_replicas: torch's name for the number of processes.

    Raises:
        ValueError: If a global batch has fewer samples than processes: one would get none.
    """

    def __init__(
        self,
        indices: Tensor,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(
                f"data.batch_size={batch_size}: the global batch needs at least one sample."
            )
        if drop_last and len(indices) < batch_size:
            raise ValueError(
                f"data.batch_size={batch_size}: drop_last drops all of {len(indices)} samples."
            )
        super().__init__(indices, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.indices = indices
        self.batch_size = batch_size
        self.num_batches_to_skip = 0  # of the next epoch, when a run resumes in the middle of it
        smallest = min((len(batch) for batch in self._split(indices)), default=0)
        if 0 < smallest < num_replicas:
            raise ValueError(
                f"data.batch_size={batch_size} leaves a global batch of {smallest} of "
                f"{len(indices)} samples, which {num_replicas} processes cannot share: use a batch "
                "size with a larger remainder, or fewer devices."
            )

    def __iter__(self) -> Iterator[BatchIndex]:
        # A generator reads the epoch at its first batch: Lightning sets it after calling `iter`.
        num_skipped, self.num_batches_to_skip = self.num_batches_to_skip, 0
        for batch in self._split(self._order())[num_skipped:]:
            yield self.epoch, batch.tensor_split(self.num_replicas)[self.rank]

    def __len__(self) -> int:
        return len(self._split(self.indices))

    def _order(self) -> Tensor:
        if not self.shuffle:
            return self.indices
        generator = new_generator(self.seed, "order", self.epoch)
        order = torch.randperm(len(self.indices), generator=generator)
        return self.indices[order.to(self.indices.device)]

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        dropped = len(order) % self.batch_size if self.drop_last else 0
        return order[: len(order) - dropped].split(self.batch_size)


class SequentialBatchSampler(GlobalBatchSampler, SequentialSampler):  # type: ignore[misc]
    """Global batches in dataset order, for evaluation: every sample once, sizes equal up to one.

    It is a `SequentialSampler` too, which tells Lightning's `overfit_batches` that nothing is
    shuffled.
    """

    def _split(self, order: Tensor) -> tuple[Tensor, ...]:
        if len(order) == 0:
            return ()
        if self.drop_last:
            return super()._split(order)
        # even sizes: a tiny last batch might have fewer samples than there are processes
        return order.tensor_split(-(-len(order) // self.batch_size))


class BatchLoader(DataLoader):
    """A `DataLoader` whose sampler yields whole batches, and which counts those of the epoch.

    Lightning saves `state_dict` in a checkpoint and loads it before the first batch. A run resumed
    from the middle of an epoch goes on with the batch after the last one it trained on.
    """

    sampler: GlobalBatchSampler

    def __init__(
        self, dataset: Dataset, sampler: GlobalBatchSampler, batch_size: None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("collate_fn", _identity)
        # for the workers' seeds: torch's default generator would lose a number that dropout draws
        kwargs["generator"] = torch.Generator()
        super().__init__(dataset, batch_size=None, sampler=sampler, **kwargs)
        self.num_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_yielded = self.sampler.num_batches_to_skip
        # Without workers torch's iterator only adds a profiler record: a fifth of the time.
        in_process = self.num_workers == 0 and not self.pin_memory
        if self.num_workers:
            seeds = stream(self.sampler.seed, "workers", self.sampler.epoch)
            self.generator.manual_seed(seeds[0])
        for batch in map(self._fetch, self.sampler) if in_process else super().__iter__():
            self.num_yielded += 1  # before the step, which may save a checkpoint at its end
            yield batch

    def _fetch(self, index: BatchIndex) -> Any:
        return self.collate_fn(self.dataset[index])

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # a finished epoch: start the next at 0
        self.sampler.num_batches_to_skip = state["num_yielded"] % max(len(self), 1)


class BatchDataset(Dataset):
    """A dataset that makes a whole batch of a `BatchIndex`.

    Its random numbers may depend on the epoch and the indices alone: only then does a resumed run
    draw the same ones.
    """


class CollatedSamples(BatchDataset):
    """Makes batches of any dataset indexed by sample: its samples, collated.

    The global generators are seeded by the seed, the epoch and the batch alone, so that samples
    draw the same numbers in any worker. Afterwards they are put back: a training step draws what it
    would have drawn.
    """

    def __init__(self, dataset: Dataset, seed: int, collate_fn: Collate) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: BatchIndex) -> Any:
        epoch, indices = index
        if type(self.dataset) is TensorDataset and self.collate_fn is default_collate:
            # one indexing operation per tensor: far faster than collating
            return [tensor[indices] for tensor in self.dataset.tensors]
        samples = indices.tolist()
        with isolate_rng(include_cuda=False):
            seed_generators(self.seed, "samples", epoch, samples[0], devices=False)
            return self.collate_fn([self.dataset[i] for i in samples])


def batch_loader(
    dataset: Dataset,
    batch_size: int,
    trainer: Trainer | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    indices: Tensor | None = None,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    **kwargs: Any,
) -> BatchLoader:
    """A loader of any dataset with a length, under the batch contract.

    Args:
        dataset: Indexed by sample, as for a `DataLoader`, or a `BatchDataset`.
        batch_size: Samples of a *global* batch, under every strategy and number of devices.
        trainer: The data module's `self.trainer`, which knows how many processes share a batch.
        shuffle: Draw a new order every epoch, for training. The default is dataset order.
        seed: For the order, and for what samples draw. The default is `seed_everything`'s.
        indices: The samples to visit, a vector, on the device that batches are gathered on. The
            default is all, on the device of a `TensorDataset`, or on the CPU for other datasets.
        drop_last: Leave out a last global batch that is smaller than the others.
        collate_fn: Makes a batch of a list of samples. The default is torch's `default_collate`.
        kwargs: Further arguments of `DataLoader`, such as `num_workers`. If `pin_memory` is not
            among them, batches are pinned where they are gathered on the CPU and the trainer's
            device copies faster from pinned memory.
    """
    if indices is None:
        in_memory = type(dataset) is TensorDataset
        device = dataset.tensors[0].device if in_memory else "cpu"  # type: ignore[attr-defined]
        indices = torch.arange(len(dataset), device=device)  # type: ignore[arg-type]
    if trainer is not None and indices.device.type == "cpu":
        kwargs.setdefault("pin_memory", copies_faster_from_pinned(trainer.strategy.root_device))
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
    world_size, rank = (trainer.world_size, trainer.global_rank) if trainer is not None else (1, 0)
    rank = rank if world_size > 1 else 0  # every process of `manual_allreduce` reads whole batches
    shuffle = shuffle and not (trainer is not None and trainer.overfit_batches)  # type: ignore[attr-defined]
    sampler_class = GlobalBatchSampler if shuffle else SequentialBatchSampler
    sampler = sampler_class(indices, batch_size, shuffle, seed, world_size, rank, drop_last)
    if isinstance(dataset, BatchDataset):
        if collate_fn is not None:
            raise ValueError("collate_fn gets samples, and this dataset makes whole batches.")
    else:
        dataset = CollatedSamples(dataset, seed, collate_fn or default_collate)
    # by keyword: for `predict`, Lightning makes another loader from its arguments, by their names
    return BatchLoader(dataset, sampler=sampler, **kwargs)


def copies_faster_from_pinned(device: torch.device) -> bool:
    """Whether a `DataLoader` should pin batches for this device.

    A loader can only pin for the machine's accelerator, and torch cannot pin for MPS. Pinning takes
    memory on the GPU, so a run on the CPU of the same machine must not do it.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


def _identity(batch: Any) -> Any:
    return batch  # DataLoader's default would search the batch for arrays to convert
