"""Rows of all processes, in shared memory and by messages."""

import numpy as np
import pytest

from tests.strategies.conftest import (
    IN_MEMORY,
    attempt,
    new_control_plane,
    rank,
    run_in_processes,
    world_size,
)

LENGTHS = [0, 1, 900, 1024, 4000, 4096, 9000]  # a cell has place for 1,024 bytes


def row_of(process, length):
    return np.arange(length).astype(np.uint8) + np.uint8(process)


def meet_all(in_memory):
    control = new_control_plane(seconds=3)
    if in_memory:
        control.use_memory()
        assert control.cells is not None
    objects = [{"a": [each] * 999 * each} for each in range(world_size())]
    assert control.all_gather_objects(objects[rank()], "objects") == objects
    for length in LENGTHS * 2:
        rows = control.all_gather(row_of(rank(), length), "rows")
        assert (rows == [row_of(each, length) for each in range(world_size())]).all()
        assert rows.shape == (world_size(), length)
    # two processes at other places: another purpose, or a row of another length, also a long one
    is_last = rank() == world_size() - 1
    found = []
    for length in (10, 9000):
        found.append(attempt(control.all_gather, row_of(0, length), "a" if is_last else "b"))
        found.append(attempt(control.all_gather, row_of(0, length + is_last), "c"))
    return found


@pytest.mark.parametrize("in_memory", [False, *([True] if IN_MEMORY else [])])
@pytest.mark.parametrize("k", [2, 3])
def test_rows_come_to_all_and_places_are_compared(k, in_memory):
    places = [f"process {i}: {'a' if i == k - 1 else 'b'}" for i in range(k)]
    for found in run_in_processes(k, meet_all, in_memory):
        assert isinstance(found, list), found
        assert all(said.startswith("PeerFailure: processes are waiting at") for said in found), (
            found
        )
        assert (
            f"different synchronization points ({', '.join(places)}). Common"
            in found[0]
            == found[2]
        )
        assert "\n" not in "".join(found)
