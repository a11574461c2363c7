"""Rows of all processes, in shared memory and by messages."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_mgpu.processes.meeting import SLOT, Cells, gather, share_memory
from tests.strategies.conftest import attempt, rank, run_in_processes, world_size

LENGTHS = [0, 1, 900, 1024, 4000, 4096, 9000]  # a cell has place for 1,024 bytes


def new_strategy(in_memory: bool) -> Any:
    """It has what a meeting asks of a strategy."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    strategy: Any = SimpleNamespace(
        cells=None,
        host_group=dist.group.WORLD,
        world_size=world_size(),
        global_rank=rank(),
        is_global_zero=rank() == 0,
        _timeout=timedelta(seconds=3),
        module=SimpleNamespace(trainer=SimpleNamespace(received_sigterm=False)),
    )

    def meet(row: Any, purpose: str) -> Any:
        return gather(strategy, row.view(np.uint8), purpose).view(row.dtype)

    strategy.gather = meet
    if in_memory:
        memory = share_memory(strategy, 2 * world_size() * SLOT.itemsize)
        assert memory is not None
        strategy.cells = Cells(strategy, memory)
    return strategy


def row_of(process: int, length: int) -> Any:
    return np.arange(length).astype(np.uint8) + np.uint8(process)


def meet_all(in_memory: bool) -> Any:
    strategy = new_strategy(in_memory)
    for length in LENGTHS * 2:
        rows = strategy.gather(row_of(rank(), length), "rows")
        assert (rows == [row_of(each, length) for each in range(world_size())]).all()
        assert rows.shape == (world_size(), length)
    # two processes at other places: another purpose, or a row of another length, also a long one
    is_last = rank() == world_size() - 1
    found = []
    for length in (10, 9000):
        found.append(attempt(strategy.gather, row_of(0, length), "a" if is_last else "b"))
        found.append(attempt(strategy.gather, row_of(0, length + is_last), "c"))
    return found


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("k", [2, 3])
def test_rows_come_to_all_and_places_are_compared(k: int, in_memory: bool) -> None:
    places = [f"process {i}: {'a' if i == k - 1 else 'b'}" for i in range(k)]
    for found in run_in_processes(k, meet_all, in_memory):
        assert isinstance(found, list), found
        assert all(said.startswith("ProcessEnded: the processes are at") for said in found), found
        assert f"different places ({', '.join(places)}). Commonest" in found[0] == found[2]
        assert "\n" not in "".join(found)
