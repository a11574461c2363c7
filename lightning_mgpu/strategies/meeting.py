"""Processes meet on the host: each gives a row of bytes and gets the rows of all.

No GPU waits for it. A meeting ends when every process has come, so it is a barrier, too. The
processes of one machine meet in shared memory, others by messages (gloo).
"""

import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ENDED = "another process has ended: see its message above"
DIFFER = "the processes do not run the same program"


class Meeting:
    """A process that is the only one. The subclasses are for several."""

    def gather(self, row: np.ndarray) -> np.ndarray:
        """The rows of all processes, (P, n) bytes.

        Raises:
            RuntimeError: If a process has ended, is late, or gives another number of bytes.
        """
        return row[None]

    def leave(self) -> None:
        """Tell the others that this process ends because of an error."""


class MessageMeeting(Meeting):
    def __init__(self, timeout: timedelta) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, row: np.ndarray) -> np.ndarray:
        rows = torch.empty(dist.get_world_size(), row.size, dtype=torch.uint8)
        dist.all_gather(list(rows), torch.tensor(row), self.group)
        return rows.numpy()


class SharedMeeting(Meeting):
    """Each process writes its row and then a count into its cells, and polls the others' counts.

    There are two sets of rows, used in turn: a process that writes into one has seen all others
    come to the meeting after its last use, so they have read it.
    """

    def __init__(self, memory: Tensor, rank: int, world_size: int, timeout: timedelta) -> None:
        cells = memory.numpy()[: 32 * world_size].view(np.int64).reshape(4, world_size)
        self.counts, self.pids, self.sizes = cells[0], cells[1], cells[2:]
        self.rows = memory.numpy()[32 * world_size :].reshape(2, world_size, -1)
        self.rank, self.timeout, self.count = rank, timeout.total_seconds(), 0
        # without a core for each, polling keeps the others from working
        has_cores = len(os.sched_getaffinity(0)) >= world_size
        self.pause = os.sched_yield if has_cores else lambda: time.sleep(5e-5)
        self.pids[rank] = os.getpid()

    def gather(self, row: np.ndarray) -> np.ndarray:
        if row.size > self.rows.shape[2]:
            raise RuntimeError("The module has grown: make all layers and buffers before fit.")
        self.count += 1
        sizes, rows = self.sizes[self.count % 2], self.rows[self.count % 2]
        sizes[self.rank], rows[self.rank, : row.size] = row.size, row
        self.counts[self.rank] = self.count  # last: the others read the row when they see it
        self._wait()
        if (sizes != row.size).any():
            raise RuntimeError(f"{DIFFER}: they exchange {sizes.tolist()} bytes")
        return rows[:, : row.size].copy()

    def leave(self) -> None:
        self.counts[self.rank] = -1

    def _wait(self) -> None:
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


def make_meeting(
    capacity: int, rank: int, size: int, timeout: timedelta, share: Callable[[int], Tensor | None]
) -> Meeting:
    """Where `size` processes meet. `share` makes shared memory, for rows of `capacity` bytes."""
    # a row must be seen before its count is: only x86 keeps the order of stores
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    memory = share((32 + 2 * capacity) * size) if is_ordered else None
    return MessageMeeting(timeout) if memory is None else SharedMeeting(memory, rank, size, timeout)


def share_memory(size: int, is_first: bool, broadcast: Callable[[Any], Any]) -> Tensor | None:
    """Zeros that all processes of the machine see, as bytes; None where there is no room."""
    path = None
    if is_first:
        try:
            file, path = tempfile.mkstemp(dir="/dev/shm")
            os.posix_fallocate(file, 0, size)  # to write past the room would be a bus error
        except OSError:
            if path is not None:
                os.unlink(path)
            path = None
    if (path := broadcast(path)) is None:
        return None
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    dist.barrier()
    if is_first:
        os.unlink(path)
        os.close(file)
    return memory


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. One that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
