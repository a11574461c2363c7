"""Buckets, their order, and what travels: without a Trainer, and within a backward pass."""

import time
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_mgpu.allreduce import ring_allreduce, tree_allreduce
from lightning_mgpu.distributed.comm.buckets import ALIGNMENT, Bucket, group_parameters, padded_size
from lightning_mgpu.distributed.comm.schedules import Message, sum_gathered
from lightning_mgpu.distributed.comm.transport import Transport
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import (
    IN_MEMORY,
    Net,
    assert_close,
    attempt,
    fit,
    new_control_plane,
    no_shared_memory,
    rank,
    run_in_processes,
    world_size,
)
from tests.strategies.test_parity import EmptyFirst

PARAMETERS = {
    torch.float64: [torch.zeros(3, 5), torch.zeros(7), torch.zeros(4, 3).t(), torch.zeros(())],
    torch.float32: [torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last), torch.zeros(9)],
    torch.bfloat16: [torch.zeros(7), torch.zeros(33, 2)],
    torch.complex64: [torch.zeros(5)],
}
ONE_PER_BUCKET = 1e-9  # MB


def new_transport():
    control = new_control_plane()
    return Transport(control, control.group)


def sum_rows(dtype, allreduce, in_memory):
    """Sums small integers, a number of times; whether all sums are right and dense."""
    parameters = [p.to(dtype) for p in PARAMETERS[dtype]]
    transport, k, memory = new_transport(), world_size(), None
    if in_memory:
        memory = transport.control.map_memory(k * sum(map(padded_size, parameters)))
        memory = memory.view(k, -1), rank()
    num_owners = 1 if k == 2 and not in_memory else k
    bucket = Bucket(parameters, num_owners, hasattr(allreduce, "elementwise"), memory)
    assert not bucket.is_elementwise or max(bucket.sizes) - min(bucket.sizes) <= ALIGNMENT
    generator = torch.Generator().manual_seed(0)
    for num_missing in (0, 1, 2):  # what a row had before does not count
        rows = [{} for _ in range(k)]
        for row in rows[num_missing:]:
            for p in parameters:
                row[p] = torch.randint(-9, 9, p.shape, generator=generator).to(dtype)
        bucket.pack(rows[rank()])
        assert bucket.matches(rows[rank()])
        transport.start("bucket", sum_gathered(bucket, allreduce, rank()))
        if in_memory:
            transport.control.all_gather(torch.zeros(1).numpy(), "all rows are written")
        for p, total in zip(parameters, transport.finish()["bucket"], strict=True):
            expected = sum((row[p] for row in rows[num_missing:]), torch.zeros_like(p))
            torch.testing.assert_close(total, expected, rtol=0, atol=0)
            assert total.stride() == torch.empty_like(p).stride()
    return True


def sum_whole(tensors):
    """It may not be called on slices."""
    assert tensors[0].shape in [p.shape for same in PARAMETERS.values() for p in same]
    ring_allreduce(tensors)


def sum_all(in_memory):
    functions = tree_allreduce, sum_whole
    return [attempt(sum_rows, *each, in_memory) for each in product(PARAMETERS, functions)]


@pytest.mark.parametrize("in_memory", [False, *([True] if IN_MEMORY else [])])
@pytest.mark.parametrize("k", [2, 3])
def test_sums_of_every_kind_of_parameter(k, in_memory):
    """Gradients need not be laid out as their parameters; sums are. A missing one is zeros."""
    for found in run_in_processes(k, sum_all, in_memory):
        assert found == [True] * 8, found


def test_buckets_grow_and_have_one_dtype():
    """The first one has a sixteenth of the cap, each later one twice as much, at most the cap."""
    parameters = [torch.zeros(4) for _ in range(64)]  # of 16 bytes
    assert group_parameters(parameters, 0) == [parameters[::-1]]
    groups = group_parameters(parameters, 256)
    assert [len(group) for group in groups] == [1, 2, 4, 8, 16, 16, 16, 1]
    assert [p for group in groups for p in group] == parameters[::-1]
    mixed = [torch.zeros(4, dtype=[torch.float32, torch.float64][i % 2]) for i in range(16)]
    for cap in (0, 128, 1e9):
        groups = group_parameters(mixed, cap)
        assert len(groups) > 2 if cap == 128 else len(groups) == 2
        assert all(len({p.dtype for p in group}) == 1 for group in groups)
        assert {id(p) for group in groups for p in group} == {*map(id, mixed)}


def twice(number):
    sent = torch.full((100_000,), number + 10 * rank(), dtype=torch.uint8)
    rows = yield Message(sent, None, [len(sent)] * world_size())
    sent = rows[:: len(sent)].clone()
    rows = yield Message(sent, None, [len(sent)] * world_size())
    return rows.view(world_size(), -1).tolist()


def travel(late):
    transport = new_transport()
    for number in range(4):
        if number == late and rank() == 0:
            time.sleep(0.3)
        transport.start(number, twice(number))
    time.sleep(0.3 * rank())
    return transport.finish()


@pytest.mark.parametrize("late", [0, 1, 3])
def test_schedules_continue_in_one_order(late):
    expected = {number: [[number, number + 10]] * 2 for number in range(4)}
    assert run_in_processes(2, travel, late) == [expected, expected]


class SharedTwice(Net):
    """A layer in two reentrant checkpoints: its hooks are called twice in a pass."""

    def loss(self, batch):
        X, layer = batch[0].requires_grad_(), self.net[0]
        for _ in range(2):
            X = checkpoint(lambda x: torch.tanh(layer(x))[:, :8], X, use_reentrant=True)
        return F.cross_entropy(self.net[2](F.pad(X, (0, 8))), batch[1])


class OwnBackward(Net):
    def backward(self, loss, *args, **kwargs):
        loss.backward()
        for p in self.parameters():
            p.grad.data.mul_(0.5)


class EditsEarlier(Net):
    """A hook on the first layer edits the last layer's gradient, which has left by then."""

    def configure_optimizers(self):
        first, last = self.net[0].weight, self.net[2].weight

        def edit(gradient):
            if self.is_there():
                last.grad.data.mul_(3.0)

        first.register_hook(edit)
        return super().configure_optimizers()

    def is_there(self):
        return True


class EditsInOne(EditsEarlier):
    def is_there(self):
        return rank() == 0


BUCKETED = SharedTwice, OwnBackward, EditsEarlier, EditsInOne, EmptyFirst


def fit_bucketed(make, cap=ONE_PER_BUCKET):
    with no_shared_memory():
        return attempt(fit, make, strategy=ManualAllreduceStrategy(bucket_cap_mb=cap))


@pytest.mark.parametrize("make", BUCKETED)
def test_a_gradient_edited_after_it_was_sent(make, in_two_processes):
    """It trains as with one bucket, which leaves after the pass, and as one device if all edit."""
    expected = in_two_processes(fit_bucketed, make, 0)[0]
    for found in in_two_processes(fit_bucketed, make):
        assert_close(found, expected, 0, 0)
    if make is not EditsInOne:
        assert_close(attempt(fit, make, strategy="auto"), expected)


class Fails(Net):
    """Fails in a backward pass, when more buckets of one process than of the other have left."""

    fails = True

    def configure_optimizers(self):
        self.net[2 * rank()].weight.register_hook(self.fail)
        return super().configure_optimizers()

    def fail(self, gradient):
        if self.fails and self.global_step == 3:
            raise KeyError("mine")


class Works(Fails):
    fails = False


def test_a_failed_fit_leaves_nothing_to_the_next(in_two_processes):
    assert in_two_processes(fit_bucketed, Fails) == ["KeyError: 'mine'"] * 2
    expected = fit(Works)
    for found in in_two_processes(fit_bucketed, Works):
        assert_close(found, expected)


class Layers(Net):
    def __init__(self):
        super().__init__(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3)))


def count_early(**kwargs):
    """How many of the buckets had started when a backward pass ended, in each update."""
    strategy = ManualAllreduceStrategy(bucket_cap_mb=ONE_PER_BUCKET)
    counts = list[int]()
    sum_over_replicas = strategy.sum_over_replicas

    def note(*args, **kwargs):
        counts.append(strategy.sync._reducer.num_early if strategy.sync._reducer else 0)
        return sum_over_replicas(*args, **kwargs)

    strategy.sum_over_replicas = note
    with no_shared_memory():
        fit(Layers, strategy=strategy, max_epochs=1, **kwargs)
    return counts


@pytest.mark.parametrize("window", [1, 3])
def test_buckets_start_within_the_pass(window, in_two_processes):
    """All 14, but in the first update, in which processes agree on their layout."""
    for counts in in_two_processes(count_early, accumulate_grad_batches=window):
        assert counts == [0] + [14] * (6 // window - 1)
