"""The batch contract: the same global batches in the same order, whatever the number of processes."""

import pytest
import torch
from torch import Tensor

from lightning_mgpu.data.batches import GlobalBatches, SequentialBatches

INDICES = torch.arange(1000, 1503)


def global_batches(world: int, epoch: int = 0, seed: int = 0, batch_size: int = 64) -> list[Tensor]:
    """The batches, every one put together from the shares of all processes."""
    samplers = [GlobalBatches(INDICES, batch_size, True, seed, world, rank) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [torch.cat([indices for _, indices in shares]) for shares in zip(*samplers, strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [64, 101, 503])
def test_shares_make_up_the_one_process_batches(world: int, batch_size: int) -> None:
    alone = global_batches(1, batch_size=batch_size)
    shared = global_batches(world, batch_size=batch_size)
    assert len(alone) == len(shared) and all(torch.equal(a, b) for a, b in zip(alone, shared))
    assert [len(batch) for batch in alone[:-1]] == [batch_size] * (len(alone) - 1)
    assert torch.equal(torch.cat(alone).sort().values, INDICES)  # every sample once, the uneven rest too


def test_order_depends_on_seed_and_epoch() -> None:
    first = torch.cat(global_batches(1))
    assert torch.equal(first, torch.cat(global_batches(1)))
    assert not torch.equal(first, torch.cat(global_batches(1, epoch=1)))
    assert not torch.equal(first, torch.cat(global_batches(1, seed=1)))
    torch.manual_seed(99)  # and on nothing else
    assert torch.equal(first, torch.cat(global_batches(1)))


def test_epoch_set_after_iter_counts() -> None:
    sampler = GlobalBatches(INDICES, 64)
    batches = iter(sampler)
    sampler.set_epoch(4)  # as Lightning does
    epoch, indices = next(batches)
    assert epoch == 4 and torch.equal(indices, global_batches(1, epoch=4)[0])


@pytest.mark.parametrize("num_samples", [10_007, 10_000, 3, 257])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_every_sample_once_in_order(num_samples: int, world: int) -> None:
    samplers = [SequentialBatches(torch.arange(num_samples), 256, world, rank) for rank in range(world)]
    batches = [torch.cat([indices for _, indices in shares]) for shares in zip(*samplers, strict=True)]
    assert torch.equal(torch.cat(batches), torch.arange(num_samples))
    assert max(map(len, batches)) <= 256 and len(batches) == len(samplers[0]) == -(-num_samples // 256)


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size=2 .* 3 processes cannot share"):
        GlobalBatches(INDICES, 2, num_replicas=3)
    with pytest.raises(ValueError, match="leaves a global batch of 1 of 5 samples"):
        GlobalBatches(torch.arange(5), 4, num_replicas=2)
    with pytest.raises(ValueError, match=r"data\.batch_size=0"):
        GlobalBatches(INDICES, 0)
    GlobalBatches(torch.arange(6), 4, num_replicas=2)
    GlobalBatches(torch.arange(0), 4, num_replicas=2)
