"""The message schedule of an allreduce as written: it sends the messages of the function."""

from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor

from lightning_mgpu.allreduce.plan import Execution, Plan
from lightning_mgpu.distributed.comm.buckets import ALIGNMENT, Bucket
from lightning_mgpu.distributed.comm.schedules import Message, MessageSchedule

Sizes = list[tuple[int, ...]]
"""Bytes per part of a message, by process and plan: (P, number of plans)."""


class WrittenBucket:
    """A bucket whose gradients are summed by plans, each process running its part on its own row.

    An elementwise allreduce has one plan for the whole row, any other allreduce one plan per
    parameter. In every superstep, one message contains the bytes of all plans.

    Args:
        bucket: Parameters, and the row of this process.
        make_plan: Returns the plan of an allreduce of k tensors like its argument.
        rank: The rank of this process.
    """

    def __init__(self, bucket: Bucket, make_plan: Callable[[Tensor], Plan], rank: int) -> None:
        self.bucket, self.rank = bucket, rank
        self.plans = [make_plan(X) for X in self._arguments(bucket.row)]
        self.sizes: list[tuple[Sizes, Sizes]] = []  # sent and received, by superstep
        for number in range(max(plan.num_supersteps for plan in self.plans)):
            steps = [plan.steps_of(rank)[number] for plan in self._active(number)]
            sent = transpose_padded(step.bytes_to for step in steps)
            self.sizes.append((sent, transpose_padded(step.bytes_from for step in steps)))

    def _active(self, number: int) -> list[Plan]:
        """The plans that send messages in a superstep."""
        return [plan for plan in self.plans if number < plan.num_supersteps]

    def _arguments(self, row: Tensor) -> list[Tensor]:
        """This process's argument of each allreduce call, as views of a row."""
        bucket = self.bucket
        return [row.view(bucket.dtype)] if bucket.is_elementwise else bucket.views(row)

    def schedule(self) -> MessageSchedule:
        # on a copy: the bucket's row is compared with gradients that may be edited in flight
        row = self.bucket.row.clone()
        arguments = zip(self.plans, self._arguments(row))
        runs = [(plan, Execution(plan, self.rank, X)) for plan, X in arguments]
        for number, (to_send, to_receive) in enumerate(self.sizes):
            active = [run for plan, run in runs if number < plan.num_supersteps]
            sent = row.new_empty(sum(chain(*to_send)))
            for run, parts in zip(active, split_by_plan(sent, to_send)):
                run.advance(number, parts)
            received = yield Message(sent, [*map(sum, to_send)], [*map(sum, to_receive)])
            for run, parts in zip(active, split_by_plan(received, to_receive)):
                run.receive(number, parts)
        for plan, run in runs:
            run.advance(plan.num_supersteps)
        return self.bucket.write_results(self.bucket.views(row))


def transpose_padded(by_plan: Iterable[list[int]]) -> Sizes:
    """Numbers of bytes by process and plan, rounded up to a multiple of ALIGNMENT."""
    return [tuple(-(-num // ALIGNMENT) * ALIGNMENT for num in nums) for nums in zip(*by_plan)]


def split_by_plan(row: Tensor, sizes: Sizes) -> list[tuple[Tensor, ...]]:
    """Split a row into the parts of all processes, per plan."""
    parts = iter(row.split([*chain(*sizes)]))
    return [*zip(*([next(parts) for _ in nums] for nums in sizes))]
