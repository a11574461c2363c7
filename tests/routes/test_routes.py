"""Buckets, their order, and what travels: without a Trainer, and within a backward pass."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_mgpu.allreduce import foreach_allreduce, ring_allreduce, textbook_allreduce
from lightning_mgpu.routes.buckets import Bucket
from lightning_mgpu.routes.courier import Courier
from lightning_mgpu.routes.sums import Message, sum_by_all, sum_by_owners, sum_in_place
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    new_meeting,
    no_shared_memory,
    rank,
    run_in_processes,
    world_size,
)

PARAMETERS = [
    torch.zeros(3, 5, dtype=torch.float64),
    torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.zeros(()),
    torch.zeros(0, 4),
    torch.zeros(7, dtype=torch.bfloat16),
    torch.zeros(5, dtype=torch.complex64),
    torch.zeros(4, 3).t(),
]
ONE_PER_BUCKET = 1e-9  # MB


def new_courier() -> Courier:
    meeting = new_meeting()
    return Courier(meeting, meeting.group)


def sum_rows(way: Any, allreduce: Any, num_rows: int) -> bool:
    """Sums small integers, a number of times; whether all sums are right and dense."""
    courier, k = new_courier(), num_rows * world_size()
    bucket = Bucket(PARAMETERS, num_rows, 1 if way is sum_by_all else world_size())
    generator = torch.Generator().manual_seed(0)
    for num_missing in (0, 1, 2):  # what a row had before does not count
        rows: list[dict[Tensor, Tensor]] = [{} for _ in range(k)]
        for row in rows[num_missing:]:
            for p in PARAMETERS:
                row[p] = torch.randint(-9, 9, p.shape, generator=generator).to(p.dtype)
        first = rank() * num_rows
        bucket.pack(rows[first : first + num_rows])
        assert bucket.holds(rows[first : first + num_rows])
        courier.start("bucket", way(bucket, allreduce, rank()))
        for p, total in zip(PARAMETERS, courier.finish()["bucket"], strict=True):
            expected = sum((row[p] for row in rows[num_missing:]), torch.zeros_like(p))
            torch.testing.assert_close(total, expected, rtol=0, atol=0)
            assert total.stride() == torch.empty_like(p).stride()
    return True


@pytest.mark.parametrize("allreduce", [textbook_allreduce, ring_allreduce, foreach_allreduce])
def test_sums_of_every_kind_of_parameter(allreduce: Callable[..., Any]) -> None:
    """Gradients need not be laid out as their parameters; sums are. A missing one is zeros."""
    assert sum_rows(sum_in_place, allreduce, 3)


def sum_by_messages(num_rows: int) -> list[Any]:
    ways = [sum_by_owners, *([sum_by_all] if (world_size(), num_rows) == (2, 1) else [])]
    return [attempt(sum_rows, way, textbook_allreduce, num_rows) for way in ways]


@pytest.mark.parametrize(("k", "num_rows"), [(2, 1), (2, 2), (3, 1)])
def test_sums_by_messages(k: int, num_rows: int) -> None:
    for found in run_in_processes(k, sum_by_messages, num_rows):
        assert found in ([True], [True, True]), found


def twice(number: int) -> Any:
    """Sends its number, and then what it has got."""
    sent = torch.full((100_000,), number + 10 * rank(), dtype=torch.uint8)
    parts = yield Message(sent, None, [len(sent)] * world_size())
    sent = torch.cat([part[:1] for part in parts])
    parts = yield Message(sent, None, [len(sent)] * world_size())
    return [part.tolist() for part in parts]


def travel(late: int) -> Any:
    """Route `late` starts late in one process, and its second message is late in the other."""
    courier = new_courier()
    for number in range(4):
        if number == late and rank() == 0:
            time.sleep(0.3)
        courier.start(number, twice(number))
    time.sleep(0.3 * rank())
    return courier.finish()


@pytest.mark.parametrize("late", [0, 1, 3])
def test_routes_go_on_in_one_order(late: int) -> None:
    expected = {number: [[number, number + 10]] * 2 for number in range(4)}
    assert run_in_processes(2, travel, late) == [expected, expected]


class SharedTwice(Net):
    """A layer in two reentrant checkpoints: its hooks are called twice in a pass."""

    def loss(self, batch: Any) -> Tensor:
        X, layer = batch[0].requires_grad_(), self.net[0]
        for _ in range(2):
            X = checkpoint(lambda x: torch.tanh(layer(x))[:, :8], X, use_reentrant=True)
        return F.cross_entropy(self.net[2](F.pad(X, (0, 8))), batch[1])


class OwnBackward(Net):
    """Edits gradients that are there, by `.data`."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        for p in self.parameters():
            p.grad.data.mul_(0.5)  # type: ignore[union-attr]


class EditsEarlier(Net):
    """A hook on the first layer edits the last layer's gradient, which has left by then."""

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].weight, self.net[2].weight

        def edit(gradient: Tensor) -> None:
            if self.is_there():
                last.grad.data.mul_(3.0)

        first.register_hook(edit)
        return super().configure_optimizers()

    def is_there(self) -> bool:
        return True


class EditsInOne(EditsEarlier):
    def is_there(self) -> bool:
        return rank() == 0


EDITED = SharedTwice, OwnBackward, EditsEarlier, EditsInOne


def fit_bucketed(make: Any, cap: float = ONE_PER_BUCKET) -> Any:
    with no_shared_memory():
        return attempt(fit, make, strategy=ManualAllreduceStrategy(bucket_cap_mb=cap))


@pytest.mark.parametrize("make", EDITED)
def test_a_gradient_edited_after_it_was_sent(make: Any, in_two_processes: Callable) -> None:
    """It trains as with one bucket, which leaves after the pass, and as one device if all edit."""
    expected = in_two_processes(fit_bucketed, make, 0)[0]
    for found in in_two_processes(fit_bucketed, make):
        assert_close(found, expected, 0, 0)
    if make is not EditsInOne:
        assert_close(attempt(fit, make, strategy="auto"), expected)


class Fails(Net):
    """Fails in a backward pass, when more buckets of one process than of the other have left."""

    fails = True

    def configure_optimizers(self) -> Any:
        self.net[2 * rank()].weight.register_hook(self.fail)
        return super().configure_optimizers()

    def fail(self, gradient: Tensor) -> None:
        if self.fails and self.global_step == 3:
            raise KeyError("mine")


class Works(Fails):
    fails = False


def test_a_failed_fit_leaves_nothing_to_the_next(in_two_processes: Callable) -> None:
    assert in_two_processes(fit_bucketed, Fails) == ["KeyError: 'mine'"] * 2
    expected = fit(Works)
    for found in in_two_processes(fit_bucketed, Works):
        assert_close(found, expected)


class Layers(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3)))


def count_early(replicas: int, **kwargs: Any) -> list[int]:
    """How many of the buckets had started when a backward pass ended, in each update."""
    strategy = ManualAllreduceStrategy(bucket_cap_mb=ONE_PER_BUCKET, replicas=replicas)
    counts = list[int]()
    exchange_all = strategy.exchange_all

    def note(*args: Any, **kwargs: Any) -> Any:
        counts.append(strategy._dispatcher.num_early if strategy._dispatcher else 0)
        return exchange_all(*args, **kwargs)

    strategy.exchange_all = note  # type: ignore[method-assign]
    with no_shared_memory():
        fit(Layers, strategy=strategy, max_epochs=1, **kwargs)
    return counts


@pytest.mark.parametrize(("replicas", "window"), [(2, 1), (4, 1), (2, 3)])
def test_buckets_start_within_the_pass(
    replicas: int, window: int, in_two_processes: Callable
) -> None:
    """All 14, but in the first update, in which processes agree on their layout."""
    for counts in in_two_processes(count_early, replicas, accumulate_grad_batches=window):
        assert counts == [0] + [14] * (6 // window - 1)
