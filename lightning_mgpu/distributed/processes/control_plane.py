"""The control plane: small messages that synchronize processes and verify their consistency.

Each rank contributes a short row of bytes, and all ranks receive all rows: in shared memory on one
machine, also with GPUs, and in one message on several machines. A row is sent in a cell of fixed
size, with its purpose and its length. So processes at different synchronization points are
detected before they deadlock.
"""

import os
import pickle
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from lightning_mgpu.distributed.processes.failures import CAUSES, ENDED, PeerFailure, wait

MOMENT = timedelta(milliseconds=20)
ROW = 1024  # bytes; the rest of a longer row follows in a message
PLACE = ("count", "length", "purpose")  # must be identical in all processes
CELL = np.dtype(
    [("count", np.int64), ("length", np.int64), ("purpose", "S24"), ("row", np.uint8, ROW)]
)
SLOT = np.dtype([("count", np.int64), ("cell", CELL)])  # of shared memory


class ControlPlane:
    """Exchanges control messages between the processes of a Trainer, and waits for messages.

    Args:
        rank: The rank of this process.
        size: The number of processes (world size).
        group: A gloo group of all processes; None for a single process.
        timeout: Seconds after which a waiting process raises an error.
        trainer: Indicates whether SIGTERM was received, and whether an exception was raised.
    """

    cells: "Cells | None" = None  # on one machine
    count = 0  # of control messages, which detects messages of a failed fit
    seconds_in_wait = cpu_seconds_in_wait = 0.0  # wall and CPU time of waiting
    spans: list[tuple[str, float, float]] | None = None  # kind, begin, end; None: not recorded

    def __init__(self, rank: int, size: int, group: Any, timeout: float, trainer: Any) -> None:
        self.rank, self.size, self.group, self.timeout = rank, size, group, timeout
        self.trainer = trainer

    @property
    def skips_sync(self) -> bool:
        """Whether this is a single process, or an exception is propagating."""
        return self.size == 1 or self.trainer.interrupted

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """A named time span, for profilers and for the timeline of `network`."""
        begin = time.monotonic()
        with record_function(kind) if _profiler_enabled() else nullcontext():
            yield
        if self.spans is not None:
            self.spans.append((kind, begin, time.monotonic()))

    def watch(self, work: Any) -> Any:
        """Record the transfer time of a message, if spans are recorded. Returns the message."""
        if self.spans is not None:
            spans, begin = self.spans, time.monotonic()
            note = lambda _: spans.append(("message", begin, time.monotonic()))  # noqa: E731
            work.get_future().add_done_callback(note)
        return work

    def all_gather(self, row: np.ndarray, purpose: str) -> np.ndarray:
        """All-gather a row (n,) of each of P processes: (P, n).

        Raises:
            PeerFailure: If a process has exited, or is at a different synchronization point.
        """
        sent = np.ascontiguousarray(row).reshape(-1).view(np.uint8)
        if self.skips_sync:
            return np.tile(sent, (self.size, 1)).view(row.dtype)
        cell, self.count = np.zeros(1, CELL), self.count + 1
        cell["count"], cell["length"], cell["purpose"] = self.count, len(sent), purpose.encode()
        cell["row"][0, : len(sent)] = sent[:ROW]
        cells = (self.cells.all_gather(cell) if self.cells else self._send_to_all(cell))[:, 0]
        if any((cells[field] != cell[field]).any() for field in PLACE):
            places = [f"process {i}: {name.decode()}" for i, name in enumerate(cells["purpose"])]
            where = ", ".join(places)
            raise PeerFailure(
                f"processes are waiting at different synchronization points ({where}). {CAUSES}."
            )
        rows = cells["row"][:, : len(sent)]
        if len(sent) > ROW:
            rows = np.concatenate([rows, self._send_to_all(sent[ROW:])], axis=1)
        return np.ascontiguousarray(rows).view(row.dtype)

    def all_gather_objects(self, item: Any, purpose: str) -> list[Any]:
        """All-gather picklable objects."""
        row = np.frombuffer(pickle.dumps(item), np.uint8)
        lengths = self.all_gather(np.array([len(row)]), purpose)[:, 0].tolist()
        rows = self.all_gather(np.resize(row, max(lengths)), purpose)
        return [pickle.loads(row[:length]) for row, length in zip(rows, lengths)]

    def _send_to_all(self, row: np.ndarray) -> np.ndarray:
        """All-gather rows of equal length in one round trip, unlike gloo's ring."""
        sent = torch.from_numpy(np.tile(row.view(np.uint8), self.size))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        self.wait_for(self.watch(work))
        return received.numpy().view(row.dtype).reshape(self.size, -1)

    def wait_for(self, work: Any, is_on_host: bool = True) -> None:
        """Wait for a message in flight, in Python; between GPUs, let the device wait."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if is_on_host:

            def block(has_begun: bool) -> None:
                # waits in C++, which frees this core; signals are handled within 20 ms
                with suppress(RuntimeError):  # a timeout; other errors are raised below
                    work.wait(MOMENT)

            with self.span("waiting"):
                wait(self, lambda: () if work.is_completed() else others, block)
        with self.naming_others():
            work.wait()

    @contextmanager
    def naming_others(self) -> Iterator[None]:
        """Raise errors of sending and receiving as a PeerFailure that names the process."""
        try:
            yield
        except RuntimeError as error:
            others = [rank for rank in range(self.size) if rank != self.rank]
            who = f"process {others[0]}" if len(others) == 1 else "another process"
            raise PeerFailure(f"{who} {ENDED}") from error

    def map_memory(self, num_bytes: int) -> Tensor | None:
        """Zeros (num_bytes,) in shared memory, or None if a process cannot map it.

        The memory is anonymous: it is always freed, and not limited by the size of `/dev/shm`.
        """
        memory, place, token = None, np.zeros(3, np.int64), secrets.randbits(60)
        if self.rank == 0:
            with suppress(OSError, AttributeError):  # too large, or not on Linux
                file = os.memfd_create(f"lightning_mgpu.{token}")
                os.posix_fallocate(file, 0, num_bytes)
                place[:] = os.getpid(), file, token
        place = self.all_gather(place, "shared memory")[0]
        path = f"/proc/{place[0]}/fd/{place[1]}"
        # on a different machine or in a different container the path does not name this file
        with suppress(OSError, RuntimeError):
            if os.readlink(path) == f"/memfd:lightning_mgpu.{place[2]} (deleted)":
                memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        is_mapped = self.all_gather(np.array([memory is not None]), "mapped memory")
        if self.rank == 0 and place[1]:
            os.close(place[1])
        return memory if is_mapped.all() else None

    def use_memory(self) -> None:
        """Use shared memory for further control messages, if all processes can map it."""
        memory = self.map_memory(2 * self.size * SLOT.itemsize)
        self.cells = None if memory is None else Cells(self, memory)


class Cells:
    """Cells of all processes in shared memory, each next to a count of control messages.

    Two sets alternate, because another process may still be reading the previous one.
    """

    def __init__(self, control: ControlPlane, memory: Tensor) -> None:
        self.slots = memory.numpy().view(SLOT).reshape(2, control.size, 1)
        self.control, self.count = control, 0
        process_ids = control.all_gather(np.array([os.getpid()]), "process ids")
        self.process_ids = process_ids[:, 0].tolist()
        self.has_cores = len(os.sched_getaffinity(0)) >= control.size

    def all_gather(self, cell: np.ndarray) -> np.ndarray:
        self.count += 1
        now, rank = self.count, self.control.rank
        slots = self.slots[now % 2]
        counts, cells = slots["count"], slots["cell"]
        cells[rank] = cell
        os.sched_yield()  # a fence: the cell is visible before the count
        counts[rank] = now
        with self.control.span("waiting"):
            wait(self.control, lambda: np.flatnonzero(counts < now).tolist(), self._pause)
        os.sched_yield()
        return cells

    def _pause(self, has_begun: bool) -> None:
        """Spin briefly if every process has a core; then sleep, to free it for other programs."""
        os.sched_yield() if self.has_cores and has_begun else time.sleep(5e-5)
