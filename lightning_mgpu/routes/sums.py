"""Routes: how the rows of a bucket come together, and the user's allreduce sums them.

Each returns the sums, one for each of the bucket's parameters: those that the allreduce has left in
this process's first row, copied to where they may stay, while other messages travel.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mgpu.allreduce import Allreduce, allreduce_many
from lightning_mgpu.routes.buckets import Bucket


class Message(NamedTuple):
    """Bytes from a process to all, itself included. All processes send at the same time."""

    sent: Tensor  # bytes (n,)
    lengths: Sequence[int] | None  # of the parts for each process; None: each gets all of it
    sizes: Sequence[int]  # bytes that come from each process


Route = Generator[Message | None, Sequence[Tensor], Any]
"""Yields messages, and gets the parts that came, by process.

None in the place of a message waits until all processes are at this place.
"""


def sum_in_place(bucket: Bucket, allreduce: Allreduce, rank: int) -> Route:
    """In memory that all processes have mapped, each sums the parameters that it owns."""
    yield None  # the rows of all are there
    parts = [memory.split(bucket.lengths)[rank] for memory in bucket.memory]
    allreduce_many(allreduce, bucket.gather_rows(parts, rank))
    yield None  # the sums are there; until the next meeting each process touches its own rows only
    return bucket.keep(bucket.rows[0])


def sum_by_owners(bucket: Bucket, allreduce: Allreduce, rank: int) -> Route:
    """Each parameter's k rows come to its owner, and the sums go back to all."""
    num_processes, size = len(bucket.sizes), bucket.sizes[rank]
    parts = yield Message(bucket.own, bucket.lengths, [bucket.lengths[rank]] * num_processes)
    allreduce_many(allreduce, bucket.gather_rows(parts, rank))
    sums = torch.cat([part[:size] for part in parts])  # of each process's first row
    parts = yield Message(sums, [size] * num_processes, bucket.sizes)
    views = [bucket.views(part, owner) for owner, part in enumerate(parts)]
    return bucket.keep([view for each in views for view in each])


def sum_by_all(bucket: Bucket, allreduce: Allreduce, rank: int) -> Route:
    """All rows come to all, and nothing goes back: for two rows, as many bytes as by owners."""
    parts = yield Message(bucket.own, None, [len(bucket.own)] * 2)
    rows = bucket.gather_rows(parts, 0)
    allreduce_many(allreduce, rows)
    return bucket.keep([each[rank * bucket.num_rows] for each in rows])


def take_all(row: Tensor, num_processes: int) -> Route:
    """The rows (n,) of all processes: (P, n)."""
    parts = yield Message(row, None, [len(row)] * num_processes)
    return torch.stack([*parts])
