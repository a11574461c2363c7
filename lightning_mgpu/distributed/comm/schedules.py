"""Message schedules: they exchange the rows of a bucket, and sum them with the user's allreduce.

Each returns the sums, one per parameter of the bucket, in memory that remains valid while messages
of other buckets are in flight.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_mgpu.allreduce import Allreduce
from lightning_mgpu.distributed.comm.buckets import Bucket


class Message(NamedTuple):
    """An all-to-all: bytes from every process to all, itself included, sent at the same time."""

    sent: Tensor  # bytes (n,)
    lengths: Sequence[int] | None  # bytes for each process; None: all bytes for each
    sizes: Sequence[int]  # bytes from each process


MessageSchedule = Generator[Message | None, Tensor, Any]
"""Yields messages, and receives the bytes of all processes, in rank order.

None instead of a message is a barrier.
"""


def sum_gathered(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """Gather all k gradients of a bucket, and call the allreduce on them."""
    if bucket.is_shared:
        return sum_in_place(bucket, allreduce, rank)
    if len(bucket.sizes) > 1:
        return reduce_at_owners(bucket, allreduce, rank)
    return all_gather_then_sum(bucket, allreduce, rank)


def sum_in_place(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """In shared memory, each owner sums its part of all rows in place."""
    yield None  # all rows are written
    parts = [row.split(bucket.sizes)[rank] for row in bucket.memory]
    for tensors in bucket.arguments(parts, rank):
        allreduce(tensors)
    yield None  # all sums are written; until a control message, each rank uses only its own row
    return bucket.write_results(bucket.gradients)


def reduce_at_owners(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """Reduce-scatter, then all-gather: owners receive their part of k rows, and send the sums."""
    own_sizes = [bucket.sizes[rank]] * len(bucket.sizes)
    received = yield Message(bucket.row, bucket.sizes, own_sizes)
    for tensors in bucket.arguments(received.split(own_sizes), rank):
        allreduce(tensors)
    # each process receives the sums of its replica
    row = yield Message(received, own_sizes, bucket.sizes)
    return bucket.write_results(bucket.views(row))


def all_gather_then_sum(bucket: Bucket, allreduce: Allreduce, rank: int) -> MessageSchedule:
    """All-gather all rows: for two processes as many bytes as by owners, in a single message."""
    num_bytes = len(bucket.row)
    received = yield Message(bucket.row, None, [num_bytes] * 2)
    rows = received.split(num_bytes)  # only one row, if an override calls this in one process
    for tensors in bucket.arguments(rows, 0):
        allreduce(tensors)
    return bucket.write_results(bucket.views(rows[rank]))


def all_gather_bytes(row: Tensor, num_processes: int) -> MessageSchedule:
    """All-gather a row (n,) of each process: (P, n)."""
    received = yield Message(row, None, [len(row)] * num_processes)
    return received.view(num_processes, len(row)).clone()
