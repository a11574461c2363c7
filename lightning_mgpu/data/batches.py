"""The batch contract: the same global batches in the same order, by any strategy on any devices.

`GlobalBatches` cuts the dataset into global batches; their order depends on the seed and the epoch
alone. Every process of a multi-process strategy gets its slice of each one, a single process gets
the whole batch (and a single-process strategy splits it over its replicas by the same rule,
`torch.tensor_split`, unless its `split` says otherwise). `BatchLoader` is a `DataLoader` that
fetches a whole batch in one indexing operation and can be resumed in the middle of an epoch.
`batch_loader` puts the three together for any dataset:

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

Item = tuple[int, Tensor]
"""What a sampler yields and a dataset is indexed with: the epoch, a vector of sample indices."""

Collate = Callable[[list[Any]], Any]


class GlobalBatches(DistributedSampler):
    """Yields `(epoch, indices)` of every global batch: process `rank`'s share among `num_replicas`.

    A `DistributedSampler`, so Lightning injects none and calls `set_epoch`. It repeats no sample.

    `indices` are the samples to visit, a vector, on the device that batches are gathered on.
    `batch_size` is global.

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
        self.first = 0  # batches of the next epoch to skip, when a run resumes in the middle of one
        smallest = min((len(batch) for batch in self._cut(indices)), default=0)
        if 0 < smallest < num_replicas:
            raise ValueError(
                f"data.batch_size={batch_size} leaves a global batch of {smallest} of "
                f"{len(indices)} samples, which {num_replicas} processes cannot share: use a batch "
                "size with a larger remainder, or fewer devices."
            )

    def __iter__(self) -> Iterator[Item]:
        # a generator: looks at the epoch at the first batch, as Lightning sets it after `iter`
        first, self.first = self.first, 0
        for batch in self._cut(self._order())[first:]:
            yield (
                self.epoch,
                batch.tensor_split(self.num_replicas)[self.rank]
                if self.num_replicas > 1
                else batch,
            )

    def __len__(self) -> int:
        return len(self._cut(self.indices))

    def _order(self) -> Tensor:
        if not self.shuffle:
            return self.indices
        generator = new_generator(self.seed, "order", self.epoch)
        order = torch.randperm(len(self.indices), generator=generator)
        return self.indices[order.to(self.indices.device)]

    def _cut(self, order: Tensor) -> tuple[Tensor, ...]:
        dropped = len(order) % self.batch_size if self.drop_last else 0
        return order[: len(order) - dropped].split(self.batch_size)


class SequentialBatches(GlobalBatches, SequentialSampler):  # type: ignore[misc]
    """Global batches in dataset order, for evaluation: every sample once, sizes equal up to one.

    A `SequentialSampler` too, by which Lightning sees that nothing is shuffled (`overfit_batches`).
    """

    def _cut(self, order: Tensor) -> tuple[Tensor, ...]:
        if len(order) == 0:
            return ()
        if self.drop_last:
            return super()._cut(order)
        # no tiny last batch that processes cannot share
        return order.tensor_split(-(-len(order) // self.batch_size))


class BatchLoader(DataLoader):
    """A `DataLoader` whose sampler yields whole batches, and which knows how far it is.

    Lightning saves `state_dict` with a checkpoint and gives it back before the first batch; a run
    resumed from the middle of an epoch goes on with the batch after the last one it trained on.
    """

    sampler: GlobalBatches

    def __init__(
        self, dataset: Dataset, sampler: GlobalBatches, batch_size: None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("collate_fn", _as_it_is)
        # of workers' seeds; the global one would draw a number, which dropout would notice
        kwargs["generator"] = torch.Generator()
        super().__init__(dataset, batch_size=None, sampler=sampler, **kwargs)
        self.num_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_yielded = self.sampler.first
        # without workers the base's iterator adds a record for the profiler, a fifth of the time
        in_process = self.num_workers == 0 and not self.pin_memory
        if self.num_workers:
            seeds = stream(self.sampler.seed, "workers", self.sampler.epoch)
            self.generator.manual_seed(seeds[0])
        for batch in map(self._fetch, self.sampler) if in_process else super().__iter__():
            self.num_yielded += 1  # before the step runs: a checkpoint is saved after it
            yield batch

    def _fetch(self, item: Item) -> Any:
        return self.collate_fn(self.dataset[item])

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # a finished epoch: start the next at 0
        self.sampler.first = state["num_yielded"] % max(len(self), 1)


class Batches(Dataset):
    """A dataset that is indexed with an `Item` and makes a whole batch of it.

    Random numbers that depend on anything but the item's epoch and indices would be others when a
    run is resumed.
    """


class Samples(Batches):
    """Any dataset indexed by sample, as one of batches: its samples, collated.

    What samples draw from the global generators depends on the seed, the epoch and the batch alone:
    it is the same in any worker, and leaves the numbers of a training step alone.
    """

    def __init__(self, dataset: Dataset, seed: int, collate_fn: Collate) -> None:
        self.dataset, self.seed, self.collate_fn = dataset, seed, collate_fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, item: Item) -> Any:
        epoch, indices = item
        if type(self.dataset) is TensorDataset and self.collate_fn is default_collate:
            # at once: far faster than collating
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
        dataset: Indexed by sample, as for a `DataLoader`, or `Batches`.
        batch_size: Samples of a *global* batch, under every strategy and number of devices.
        trainer: The data module's `self.trainer`, which says how many processes share a batch.
        shuffle: For training: draw a new order every epoch. Left out: all samples, dataset order.
        seed: Of the order, and of what samples draw. Left out: `seed_everything`'s.
        indices: The samples to visit, a vector, on the device that batches are gathered on. Left
            out: all, on the device of a `TensorDataset`, and on the CPU for any other dataset.
        drop_last: Leave out a last global batch that is smaller than the others.
        collate_fn: Makes a batch of a list of samples. Left out: torch's `default_collate`.
        kwargs: Further arguments of `DataLoader`, such as `num_workers`. Without `pin_memory`,
            batches are pinned if they are gathered on the CPU and the trainer's device copies
            faster from pinned memory.
    """
    if indices is None:
        in_memory = type(dataset) is TensorDataset
        device = dataset.tensors[0].device if in_memory else "cpu"  # type: ignore[attr-defined]
        indices = torch.arange(len(dataset), device=device)  # type: ignore[arg-type]
    if trainer is not None and indices.device.type == "cpu":
        kwargs.setdefault("pin_memory", copies_faster_from_pinned(trainer.strategy.root_device))
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
    share = (trainer.world_size, trainer.global_rank) if trainer is not None else (1, 0)
    shuffle = shuffle and not (trainer is not None and trainer.overfit_batches)  # type: ignore[attr-defined]
    kind = GlobalBatches if shuffle else SequentialBatches
    sampler = kind(indices, batch_size, shuffle, seed, *share, drop_last)
    if isinstance(dataset, Batches):
        if collate_fn is not None:
            raise ValueError("collate_fn gets samples, and this dataset makes whole batches.")
    else:
        dataset = Samples(dataset, seed, collate_fn or default_collate)
    # by keyword: for `predict` Lightning makes the loader anew from its arguments
    return BatchLoader(dataset, sampler=sampler, **kwargs)


def copies_faster_from_pinned(device: torch.device) -> bool:
    """Whether a `DataLoader` should pin batches for this device.

    A loader can only pin for the machine's accelerator, and torch cannot pin for MPS. Pinning takes
    memory on the GPU, so a run on the CPU of the same machine must not do it.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


def _as_it_is(batch: Any) -> Any:
    return batch  # the default looks through it for arrays to convert
