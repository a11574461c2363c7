"""The map in strategies/__init__.py has the stops of a batch in the order of their calls."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lightning_mgpu import strategies
from tests.strategies.conftest import IN_MEMORY, Net, fit, samples

STOP = re.compile(r" ?\d+\. +([\w.]+) .* ([\w/]+\.py)$", re.MULTILINE)
PACKAGE = Path(strategies.__file__).parents[1]


def stops() -> dict[tuple[str, str], str]:
    """By file and name of a function's code, what the map calls it."""
    found: dict[tuple[str, str], str] = {}
    for name, file in STOP.findall(strategies.__doc__ or ""):
        path = PACKAGE / (file if "/" in file else f"strategies/{file}")
        method = {"ShardReader": "__getitem__"}.get(name, name.rpartition(".")[2])
        found[str(path), method] = name
    return found


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", samples(1).tensors[1].clone())


def walk() -> list[str]:
    """The stops of one batch."""
    by_code, seen = stops(), list[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = by_code.get((frame.f_code.co_filename, frame.f_code.co_name))
        if name and event == "call" and name not in seen:
            seen.append(name)

    class Steps(Buffered):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # the third step is like all that follow
                seen.clear()

    sys.setprofile(note)
    try:
        fit(Steps, replicas=4, max_steps=3)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif(not IN_MEMORY, reason="buckets start within the pass")
def test_the_map_is_the_order_of_the_calls(in_two_processes: Callable) -> None:
    names = list(stops().values())
    assert len(names) == 15
    assert in_two_processes(walk) == [names, names]
