"""Memory that all CPU processes of a machine have mapped, and meetings of the processes in it."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.strategies.ends import CAUSES, ProcessEnded

CELL = 4096  # bytes: a count, a length, and a row


def share_memory(strategy: Any, num_bytes: int) -> Tensor | None:
    """Zeros that all processes have mapped, (num_bytes,), or None if one of them cannot.

    The memory has no name that could be left behind, and does not count as `/dev/shm`.
    """
    memory, place, token = None, np.zeros(3, np.int64), secrets.randbits(60)
    if strategy.is_global_zero:
        with suppress(OSError, AttributeError):  # too large, or not on Linux
            place[:] = os.getpid(), os.memfd_create(f"lightning_mgpu.{token}"), token
            os.posix_fallocate(place[1], 0, num_bytes)
    place = strategy.start_gather(place)().view(np.int64)[0]
    path = f"/proc/{place[0]}/fd/{place[1]}"
    # on another machine, or in another container, the path is another file or none
    with suppress(OSError, RuntimeError):
        if os.readlink(path) == f"/memfd:lightning_mgpu.{place[2]} (deleted)":
            memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    is_mapped = strategy.start_gather(np.array([memory is not None]))()
    if strategy.is_global_zero and place[1]:
        os.close(place[1])
    return memory if is_mapped.all() else None


class Meeting:
    """Processes that exchange short rows in shared memory, which is faster than messages.

    Every process writes its row and its length into a cell of its own, and then a count of the
    meetings. There are two sets of cells, used in turn, because another process may still read
    those of the last one.
    """

    def __init__(self, memory: Tensor, rank: int, num_processes: int) -> None:
        cells = memory.numpy().reshape(2, num_processes, CELL)
        self.headers, self.rows = cells[..., :16].view(np.int64), cells[..., 16:]
        self.rank, self.count = rank, 0

    def start(self, row: np.ndarray) -> Callable[[], list[int]]:
        """Write a row of bytes (n,). The function returned lists the processes that are late."""
        self.count += 1
        now, headers = self.count, self.headers[self.count % 2]
        self.rows[now % 2, self.rank, : len(row)] = row
        headers[self.rank, 1] = len(row)
        os.sched_yield()  # lets go of Python's lock, so that others see the row before the count
        headers[self.rank, 0] = now
        return lambda: np.flatnonzero(headers[:, 0] < now).tolist()

    def read(self, length: int) -> np.ndarray:
        """The rows of all processes, (P, n), when none is late.

        Raises:
            ProcessEnded: If one has sent a row of another length.
        """
        os.sched_yield()
        if (self.headers[self.count % 2, :, 1] != length).any():
            raise ProcessEnded(f"the processes are at different places. {CAUSES}.")
        return self.rows[self.count % 2, :, :length].copy()
