"""The processes of one machine meet, and have their rows, in memory that all of them see."""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.strategies.exchange import Exchange, rows_in

ENDED = "another process has ended: see its message above"


class SharedMeeting:
    """Each process writes its row and then a count into its cells, and polls the others' counts.

    There are two sets of rows, used in turn: a process that writes into one has seen all others
    come to the meeting after its last use, so they have read it.
    """

    def __init__(self, strategy: Any, memory: Tensor) -> None:
        self.rank, size = strategy.global_rank, strategy.world_size
        cells = memory.numpy()[: 32 * size].view(np.int64).reshape(4, size)
        self.counts, self.pids, self.sizes = cells[0], cells[1], cells[2:]
        self.rows = memory.numpy()[32 * size :].reshape(2, size, -1)
        self.timeout, self.count = strategy.timeout.total_seconds(), 0
        # without a core for each, polling keeps the others from working
        has_cores = len(os.sched_getaffinity(0)) >= size
        self.pause = os.sched_yield if has_cores else lambda: time.sleep(5e-5)
        self.pids[self.rank] = os.getpid()

    def gather(self, row: np.ndarray) -> np.ndarray:
        """The rows of all processes, (P, n) bytes; it returns when all have come.

        Raises:
            RuntimeError: If a process has ended, is late, or gives another number of bytes.
        """
        self.count += 1
        sizes, rows = self.sizes[self.count % 2], self.rows[self.count % 2]
        sizes[self.rank], rows[self.rank, : row.size] = row.size, row
        self.counts[self.rank] = self.count  # last: the others read the row when they see it
        start = looked = time.monotonic()
        while self.counts.min() < self.count:
            self.pause()
            if (now := time.monotonic()) > looked + 0.5:
                looked = now
                if self.counts.min() < 0 or not all(map(is_alive, self.pids)):
                    raise RuntimeError(ENDED)
                if now > start + self.timeout:
                    late = self.counts.argmin()
                    raise RuntimeError(f"process {late} did not come within {self.timeout:.0f} s")
        if (sizes != row.size).any():
            raise RuntimeError(f"The processes do not run the same program: {sizes.tolist()} bytes")
        return rows[:, : row.size].copy()

    def leave(self) -> None:
        """Tell the others that this process ends because of an error."""
        self.counts[self.rank] = -1


class SharedExchange(Exchange):
    """Outside of `sum` a process touches only the rows of its own replicas. Nothing is sent."""

    def __init__(self, memory: Tensor, strategy: Any, parameters: Sequence[Tensor]) -> None:
        self.memory = memory
        super().__init__(strategy, parameters)

    def make_rows(self, r: int, rank: int) -> None:
        blocks = self.memory.view(-1, sum(self.sizes))
        rows = [rows_in(block, self.parameters) for block in blocks]
        self.local_rows, self.sums = rows[rank * r : rank * r + r], rows[rank * r]
        self.owned_rows = list(zip(*(each[self.mine] for each in rows)))

    def bring_to_owners(self) -> None:
        """The owners see the rows already."""

    def hand_back(self) -> None:
        self.strategy.gather(np.empty(0, np.uint8))  # all owners have finished


def share_memory(size: int, strategy: Any) -> Tensor | None:
    """Zeros that all processes of the machine see, as bytes; None where there is no room."""
    path, is_first = None, strategy.is_global_zero
    if is_first:
        try:
            file, path = tempfile.mkstemp(dir="/dev/shm")
            os.posix_fallocate(file, 0, size)  # to write past the room would be a bus error
        except OSError:
            if path is not None:
                os.unlink(path)
            path = None
    if (path := strategy.broadcast(path)) is None:
        return None
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    strategy.barrier()
    if is_first:
        os.unlink(path)
        os.close(file)
    return memory


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. One that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
