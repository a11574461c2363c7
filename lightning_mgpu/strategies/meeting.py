"""Processes meet on the host: each gives a row of bytes and gets the rows of all.

No GPU waits for it. A meeting ends when every process has come, so it is a barrier as well. The
processes of one machine meet in shared memory; others, by messages (gloo).
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
ELSEWHERE = "the processes do not run the same program"

Broadcast = Callable[[Any], Any]


class Meeting:
    """A process that is the only one. The other classes are for several."""

    def gather(self, row: np.ndarray) -> np.ndarray:
        """The rows of all processes, (P, n) bytes, for a row of n bytes.

        Raises:
            RuntimeError: If a process has ended, is late, or gives another number of bytes.
        """
        return row[None]

    def leave(self) -> None:
        """Tell the others that this process ends because of an error."""


class MessageMeeting(Meeting):
    """By gloo messages, in a group of its own."""

    def __init__(self, timeout: timedelta) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, row: np.ndarray) -> np.ndarray:
        rows = torch.empty(dist.get_world_size(), row.size, dtype=torch.uint8)
        dist.all_gather(list(rows), torch.from_numpy(row.copy()), self.group)
        return rows.numpy()


class SharedMeeting(Meeting):
    """In shared memory: each process writes its row and a count, and polls the others' counts.

    There are two sets of rows, used in turn. A process that writes its row of a meeting has seen
    all others come to the one before, so nobody still reads the row of the meeting before that.
    """

    def __init__(self, memory: Tensor, rank: int, world_size: int, timeout: timedelta) -> None:
        header, rows = memory.numpy()[: 64 * world_size], memory.numpy()[64 * world_size :]
        self.header = header.view(np.int64).reshape(8, world_size)
        self.counts, self.pids, self.sizes = self.header[0], self.header[1], self.header[2:4]
        self.rows = rows[: rows.size // (2 * world_size) * 2 * world_size].reshape(
            2, world_size, -1
        )
        self.rank, self.timeout, self.count = rank, timeout.total_seconds(), 0
        # polling without a pause would keep the others from their core
        has_cores = len(os.sched_getaffinity(0)) >= world_size
        self.pause = os.sched_yield if has_cores else lambda: time.sleep(5e-5)
        self.pids[rank] = os.getpid()

    def gather(self, row: np.ndarray) -> np.ndarray:
        self.count += 1
        turn, n = self.count % 2, row.size
        if n > self.rows.shape[2]:
            raise RuntimeError(
                f"{n} bytes do not fit into {self.rows.shape[2]}: the module has grown since the "
                "start of fit; make all of its layers and buffers before"
            )
        self.rows[turn, self.rank, :n] = row
        self.sizes[turn, self.rank] = n
        self.counts[self.rank] = self.count  # last: the others read the row once they see it
        self._wait()
        if (different := np.flatnonzero(self.sizes[turn] != n)).size:
            other = int(different[0])
            raise RuntimeError(
                f"{ELSEWHERE}: process {self.rank} exchanges {n} bytes where process {other} "
                f"exchanges {self.sizes[turn, other]}"
            )
        return self.rows[turn, :, :n].copy()

    def leave(self) -> None:
        self.counts[self.rank] = -1

    def _wait(self) -> None:
        start = look = time.monotonic()
        while self.counts.min() < self.count:
            self.pause()
            if (now := time.monotonic()) < look + 0.5:
                continue
            look = now
            if self.counts.min() < 0 or not all(map(is_alive, self.pids)):
                raise RuntimeError(ENDED)
            if now > start + self.timeout:
                late = int(self.counts.argmin())
                raise RuntimeError(f"process {late} did not come within {self.timeout:.0f} s")


def make_meeting(
    capacity: int, rank: int, world_size: int, timeout: timedelta, local: Broadcast | None
) -> Meeting:
    """How these processes meet: rows of at most `capacity` bytes, if they are in shared memory.

    Args:
        local: Sends process 0's object to all processes, if all run on the CPU of one machine.
    """
    if world_size == 1:
        return Meeting()
    # a row must be in memory before its count is: x86 keeps the order of stores
    if local is not None and platform.machine() in ("x86_64", "AMD64"):
        memory = share_memory((64 + 2 * capacity) * world_size, rank == 0, local)
        if memory is not None:
            return SharedMeeting(memory, rank, world_size, timeout)
    return MessageMeeting(timeout)


def share_memory(size: int, is_first: bool, broadcast: Broadcast) -> Tensor | None:
    """Bytes, zero at first, that all processes of the machine see; None if there is no room."""
    path = None
    if is_first:
        try:
            file, path = tempfile.mkstemp(dir="/dev/shm")
            try:
                os.posix_fallocate(file, 0, size)  # writing past the room would be a bus error
            finally:
                os.close(file)
        except OSError:
            if path is not None:
                os.unlink(path)
            path = None
    path = broadcast(path)
    if path is None:
        return None
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    broadcast(None)  # process 0 deletes the file's name when all have mapped it
    dist.barrier()
    if is_first:
        os.unlink(path)
    return memory


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. One that waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
