"""Meetings: every process brings a row of bytes, and gets the rows of all.

The processes of one machine meet in memory that all have mapped, GPUs or not. Others send a message
to each other. Either way a row goes in a cell of a fixed size, after its purpose and its length, so
that processes at different places of a program are told apart before they wait for each other.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.processes.ends import CAUSES, ENDED, ProcessEnded, wait

ROW = 1024  # bytes; what does not fit follows in a message
CELL = np.dtype([("length", np.int64), ("purpose", "S24"), ("row", np.uint8, ROW)])
SLOT = np.dtype([("count", np.int64), ("cell", CELL)])  # of shared memory


def gather(strategy: Any, row: np.ndarray, purpose: str) -> np.ndarray:
    """The rows (n,) of all processes, as bytes (P, n).

    Raises:
        ProcessEnded: If another process brings a row for another purpose, or has ended.
    """
    cell = np.zeros(1, CELL)
    cell["length"], cell["purpose"] = len(row), purpose.encode()
    cell["row"][0, : len(row)] = row[:ROW]
    meet = strategy.cells.gather if strategy.cells else partial(send_to_all, strategy)
    cells = meet(cell)[:, 0]
    if any((cells[field] != cell[field]).any() for field in ("length", "purpose")):
        places = [f"process {i}: {each.decode()}" for i, each in enumerate(cells["purpose"])]
        where = ", ".join(places)
        raise ProcessEnded(f"the processes are at different places ({where}). {CAUSES}.")
    rows = cells["row"][:, : len(row)]
    if len(row) > ROW:
        rows = np.concatenate([rows, send_to_all(strategy, row[ROW:])], axis=1)
    return np.ascontiguousarray(rows)


def send_to_all(strategy: Any, row: np.ndarray) -> np.ndarray:
    """Rows of equal length, (P, n), by a message: all at once, not around a ring."""
    return start_sending(strategy, row.view(np.uint8), strategy.host_group)().view(row.dtype)


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
    """The cells of all processes in shared memory, each beside a count of the meetings.

    There are two sets, used in turn, because another process may still read those of the last
    meeting.
    """

    def __init__(self, strategy: Any, memory: Tensor) -> None:
        self.slots = memory.numpy().view(SLOT).reshape(2, strategy.world_size, 1)
        self.strategy, self.count = strategy, 0
        self.process_ids = strategy.gather(np.array([os.getpid()]), "process ids")[:, 0].tolist()
        self.has_cores = len(os.sched_getaffinity(0)) >= strategy.world_size

    def gather(self, cell: np.ndarray) -> np.ndarray:
        self.count += 1
        now, rank = self.count, self.strategy.global_rank
        slots = self.slots[now % 2]
        counts, cells = slots["count"], slots["cell"]
        cells[rank] = cell
        os.sched_yield()  # a fence: others see the cell before the count
        counts[rank] = now
        wait(self.strategy, lambda: np.flatnonzero(counts < now).tolist())
        os.sched_yield()
        return cells
