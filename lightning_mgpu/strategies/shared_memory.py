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
            file = os.memfd_create(f"lightning_mgpu.{token}")
            os.posix_fallocate(file, 0, num_bytes)
            place[:] = os.getpid(), file, token
    place = strategy.gather(place)[0]
    path = f"/proc/{place[0]}/fd/{place[1]}"
    # on another machine, or in another container, the path is another file or none
    with suppress(OSError, RuntimeError):
        if os.readlink(path) == f"/memfd:lightning_mgpu.{place[2]} (deleted)":
            memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    is_mapped = strategy.gather(np.array([memory is not None]))
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

    def start(self, row: np.ndarray) -> tuple[Callable[[], list[int]], Callable[[], np.ndarray]]:
        """Write a row of bytes (n,).

        Of the functions returned, one lists the processes that are late. The other one reads the
        rows of all, (P, n), when none is late, and raises a ProcessEnded if their lengths differ.
        """
        self.count += 1
        now, n = self.count, len(row)
        headers, rows = self.headers[now % 2], self.rows[now % 2]
        rows[self.rank, :n], headers[self.rank, 1] = row, n
        os.sched_yield()  # a fence: others see the row before the count
        headers[self.rank, 0] = now

        def read() -> np.ndarray:
            os.sched_yield()
            if (headers[:, 1] != n).any():
                raise ProcessEnded(f"the processes are at different places. {CAUSES}.")
            return rows[:, :n].copy()

        return lambda: np.flatnonzero(headers[:, 0] < now).tolist(), read
