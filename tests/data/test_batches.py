"""The batch contract: the same global batches in the same order, for any number of processes."""

import random
from itertools import chain, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_mgpu.data import batch_loader
from lightning_mgpu.data.images import InMemoryImages


def loader(dataset, size, processes=1, rank=0, **options):
    """A loader as a process of a Trainer has it that does not cut batches: under `ddp`."""
    epoch, device = options.pop("epoch", 0), torch.device(options.pop("device", "cpu"))
    share = {"world_size": processes, "global_rank": rank, "overfit_batches": 0}
    share["predicting"] = options.pop("predicting", False)
    trainer = SimpleNamespace(**share, strategy=SimpleNamespace(root_device=device))
    found = batch_loader(dataset, size, trainer, **options)
    found.sampler.set_epoch(epoch)
    return found


def slices(processes, size=64, num=503, **options):
    numbers = TensorDataset(torch.arange(num))
    loaders = [loader(numbers, size, processes, rank, **options) for rank in range(processes)]
    parts = [[X.tolist() for (X,) in each] for each in loaders]
    for each, mine in zip(loaders, parts):
        assert each.sampler.seen_batch_indices == mine, "the indices are the samples here"
    return [list(batch) for batch in zip(*parts, strict=True)]


def joined(*args, **options):
    return [list(chain(*parts)) for parts in slices(*args, **options)]


def test_processes_share_the_batches_of_one():
    for size, processes in product((64, 101, 503), (2, 3, 4)):
        whole = joined(1, size, shuffle=True)
        assert sorted(chain(*whole)) == list(range(503))  # every sample once, the uneven rest too
        assert {len(batch) for batch in whole[:-1]} <= {size}
        assert joined(processes, size, shuffle=True) == whole
        full = [batch for batch in whole if len(batch) == size]
        assert joined(processes, size, shuffle=True, drop_last=True) == full
        evaluated = joined(processes, size, drop_last=True, predicting=True)
        assert list(chain(*evaluated)) == list(range(503))
        sizes = [*map(len, evaluated)]
        assert len(sizes) == -(-503 // size) and max(sizes) - min(sizes) <= 1


def test_order_and_seed_depend_only_on_seed_and_epoch():
    """A `ShardLoader` goes by `whole_batches` and `pass_seed`: they are what a loop gets."""
    orders, seeds = set(), set()
    for seed, epoch in [*product(range(3), range(3))] * 2:
        torch.manual_seed(len(orders))
        each = loader(TensorDataset(torch.arange(99)), 64, shuffle=True, seed=seed, epoch=epoch)
        orders.add(tuple(chain(*(X.tolist() for (X,) in each))))
        orders.add(tuple(chain(*each.sampler.whole_batches())))
        seeds.add(each.sampler.pass_seed)
    assert len(orders) == len(seeds) == 9  # with seed + epoch they would be 5


def test_batches_that_cannot_be_shared_are_refused():
    few = "data.batch_size={} leaves a batch of only {} of {} samples for {} processes"
    nothing = "{2} samples in batches of {0}: nothing to read"
    for args, options, hint, numbers in (
        ((2, 4, 5), {"shuffle": True}, few, (4, 1, 5, 2)),
        ((3, 64, 2), {}, few, (64, 2, 2, 3)),
        ((1, 504, 503), {"drop_last": True}, few, (504, 0, 503, 1)),
        ((1, 0, 503), {}, nothing, (0, 0, 503)),
        ((1, 64, 0), {"shuffle": True}, nothing, (64, 0, 0)),
    ):
        with pytest.raises(ValueError, match=hint.format(*numbers)):
            slices(*args, **options)


class Noise(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_samples_draw_the_same_in_any_worker_and_process():
    """By seed, epoch and place in the batch; other random numbers do not notice."""

    def drawn(seed=1, epoch=2, processes=1, **options):
        options |= {"shuffle": True, "seed": seed, "epoch": epoch}
        loaders = (loader(Noise(), 5, processes, rank, **options) for rank in range(processes))
        batches = (torch.stack(batch, 1) for each in loaders for batch in each)
        return sorted(torch.cat(list(batches)).tolist())

    torch.manual_seed(0)
    found = drawn()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
    assert drawn(num_workers=2) == drawn(processes=2) == drawn(processes=4) == found
    noise = [row[1:] for rows in (found, drawn(2), drawn(1, 3)) for row in rows]
    assert len({value for row in noise for value in row}) == 3 * 10 * 3


def test_batches_are_pinned_for_a_gpu():
    """`meta` stands for a GPU: images that are there already cannot be pinned."""
    there = InMemoryImages(torch.ones(9, device="meta"), torch.ones(9))
    for device, is_pinned in (("cuda:1", True), ("cpu", False), ("mps", False)):
        assert loader(TensorDataset(torch.ones(9)), 3, device=device).pin_memory is is_pinned
        assert not loader(there, 3, device=device).pin_memory
