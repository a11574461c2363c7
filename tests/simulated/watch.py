"""Counts waits of a GPU's host, bytes between simulated devices, and the bytes they hold."""

import ctypes
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulated.devices import build

LIBRARY = ctypes.CDLL(str(build()))
LIBRARY.sim_memory.restype = ctypes.c_int64
TOLD = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Seen:
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # by what happened and where
    num_bytes: int = 0  # copied between devices
    is_on: bool = True  # a test may look at some steps only


@contextmanager
def watched() -> Iterator[Seen]:
    """Look at what runs inside the block, in all threads."""
    seen = Seen()

    def tell(what: bytes) -> None:
        name = what.decode()
        if seen.is_on and name.startswith("peer copy"):
            seen.num_bytes += int(name.rpartition(" ")[2])
        elif seen.is_on and "async" not in name:  # nothing waits for a copy from pinned memory
            seen.waits[name, _place()] += 1

    told = TOLD(tell)  # kept alive as long as the library may call it
    LIBRARY.sim_watch_peers(1)
    LIBRARY.sim_watch(told)
    try:
        yield seen
    finally:
        LIBRARY.sim_watch(None)
        LIBRARY.sim_watch_peers(0)


def bytes_held(device: int) -> int:
    """The bytes of all tensors on a simulated device."""
    return int(LIBRARY.sim_memory(device))


def _place() -> str:
    """The innermost line of this repository, else of any file; autograd's threads have none."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(REPOSITORY)] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "autograd"
