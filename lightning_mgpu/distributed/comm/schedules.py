"""Message schedules: how the rows of a bucket are exchanged, and the user's allreduce sums them.

Each returns the sums, one per parameter of the bucket. It writes them to where they may stay while
messages of other buckets are in flight.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_mgpu.allreduce import Allreduce
from lightning_mgpu.distributed.comm.buckets import Bucket


class Message(NamedTuple):
    """Bytes from every process to all, itself included. All processes send at the same time."""

    sent: Tensor  # bytes (n,)
    lengths: Sequence[int] | None  # of the part for each process; None: each gets all of it
    sizes: Sequence[int]  # bytes that each process sends to this one


MessageSchedule = Generator[Message | None, Tensor, Any]
"""Yields messages, and gets the bytes of all processes, in their order.

A None instead of a message waits until all processes have reached it.
"""


def sum_gathered(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """Gather the k gradients in one place, where the allreduce is called."""
    if bucket.is_shared:
        return sum_in_place(bucket, allreduce, rank)
    if len(bucket.sizes) > 1:
        return reduce_at_owners(bucket, allreduce, rank)
    return all_gather_then_sum(bucket, allreduce, rank)


def sum_in_place(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """In memory that all processes have mapped, each owner sums its part of the rows."""
    yield None  # all rows are written
    parts = [row.split(bucket.sizes)[rank] for row in bucket.memory]
    for tensors in bucket.arguments(parts, rank):
        allreduce(tensors)
    yield None  # all sums are written; until the next control message, only one's own row is used
    return bucket.write_results(bucket.gradients)


def reduce_at_owners(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """A reduce-scatter and an all-gather: owners receive their part of k rows, and send the sum."""
    own_sizes = [bucket.sizes[rank]] * len(bucket.sizes)
    received = yield Message(bucket.row, bucket.sizes, own_sizes)
    for tensors in bucket.arguments(received.split(own_sizes), rank):
        allreduce(tensors)
    # each process gets the sum that belongs to its replica
    row = yield Message(received, own_sizes, bucket.sizes)
    return bucket.write_results(bucket.views(row))


def all_gather_then_sum(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """Every process receives all rows: for two, as many bytes as by owners, in one message."""
    received = yield Message(bucket.row, None, [len(bucket.row)] * 2)
    rows = received.chunk(2)
    for tensors in bucket.arguments(rows, 0):
        allreduce(tensors)
    return bucket.write_results(bucket.views(rows[rank]))


def all_gather_bytes(row: Tensor, num_processes: int) -> MessageSchedule:
    """The rows (n,) of all processes: (P, n)."""
    received = yield Message(row, None, [len(row)] * num_processes)
    return received.view(num_processes, len(row)).clone()
