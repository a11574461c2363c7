"""Meetings: every process brings a row of bytes, and gets the rows of all.

The processes of one machine meet in memory that all have mapped, GPUs or not. Others send a message
to each other. Either way a row goes in a cell of a fixed size, after its purpose and its length, so
that processes at different places of a program are told apart before they wait for each other.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.processes.ends import CAUSES, ENDED, ProcessEnded, wait

CELL = 1024  # bytes, of which 8 are for a count; what does not fit follows in a message
HEADER = np.dtype([("length", np.int64), ("purpose", "S24")])


def gather(strategy: Any, row: np.ndarray, purpose: str) -> np.ndarray:
    """The rows (n,) of all processes, as bytes (P, n).

    Raises:
        ProcessEnded: If another process brings a row for another purpose, or has ended.
    """
    size = CELL - 8 - HEADER.itemsize
    header = np.array([(len(row), purpose.encode())], HEADER)
    cell = np.zeros(HEADER.itemsize + size, np.uint8)
    cell[: HEADER.itemsize] = header.view(np.uint8)
    cell[HEADER.itemsize :][: len(row)] = row[:size]
    cells = strategy.cells.gather(cell) if strategy.cells else send_to_all(strategy, cell)
    headers = cells[:, : HEADER.itemsize].copy().view(HEADER)[:, 0]
    if (headers != header).any():
        places = [f"process {i}: {each['purpose'].decode()}" for i, each in enumerate(headers)]
        where = ", ".join(places)
        raise ProcessEnded(f"the processes are at different places ({where}). {CAUSES}.")
    rows = cells[:, HEADER.itemsize :][:, : len(row)]
    if len(row) > size:
        rows = np.concatenate([rows, send_to_all(strategy, row[size:])], axis=1)
    return np.ascontiguousarray(rows)


def send_to_all(strategy: Any, row: np.ndarray) -> np.ndarray:
    """Rows of equal length, (P, n), by a message: all at once, not around a ring."""
    return start_sending(strategy, row, strategy.host_group)()


def start_sending(strategy: Any, row: np.ndarray, group: Any) -> Callable[[], np.ndarray]:
    """Send a row, and return at once: a function that waits for the rows of all."""
    sent = torch.from_numpy(np.tile(row, strategy.world_size))
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def receive() -> np.ndarray:
        finish(strategy, work)
        return received.numpy().reshape(strategy.world_size, -1)

    return receive


def finish(strategy: Any, work: Any, is_on_host: bool = True) -> None:
    """Wait for a message on its way, in Python; for one between GPUs, let the device wait."""
    others = [each for each in range(strategy.world_size) if each != strategy.global_rank]
    if is_on_host:
        wait(strategy, lambda: () if work.is_completed() else others)
    try:
        work.wait()
    except RuntimeError as error:
        raise ProcessEnded(f"another process {ENDED}") from error


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
    place = strategy.gather(place, "shared memory")[0]
    path = f"/proc/{place[0]}/fd/{place[1]}"
    # on another machine, or in another container, the path is another file or none
    with suppress(OSError, RuntimeError):
        if os.readlink(path) == f"/memfd:lightning_mgpu.{place[2]} (deleted)":
            memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    is_mapped = strategy.gather(np.array([memory is not None]), "mapped memory")
    if strategy.is_global_zero and place[1]:
        os.close(place[1])
    return memory if is_mapped.all() else None


class Cells:
    """The cells of all processes in shared memory: a count of the meetings, and bytes.

    There are two sets, used in turn, because another process may still read those of the last
    meeting.
    """

    def __init__(self, strategy: Any, memory: Tensor) -> None:
        cells = memory.numpy().reshape(2, strategy.world_size, CELL)
        self.counts, self.rows = cells[..., :8].view(np.int64)[..., 0], cells[..., 8:]
        self.strategy, self.count = strategy, 0
        self.process_ids = strategy.gather(np.array([os.getpid()]), "process ids")[:, 0].tolist()
        self.has_cores = len(os.sched_getaffinity(0)) >= strategy.world_size

    def gather(self, cell: np.ndarray) -> np.ndarray:
        self.count += 1
        now, rank = self.count, self.strategy.global_rank
        counts, rows = self.counts[now % 2], self.rows[now % 2]
        rows[rank] = cell
        os.sched_yield()  # a fence: others see the row before the count
        counts[rank] = now
        wait(self.strategy, lambda: np.flatnonzero(counts < now).tolist())
        os.sched_yield()
        return rows
