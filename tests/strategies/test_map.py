"""The map in strategies/__init__.py has the nine stops of a batch in the order of their calls."""

import re
import sys
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_mgpu import strategies
from tests.strategies.conftest import Net, fit, run_in_processes, samples

STOP = re.compile(r" ?\d+\. +([\w.]+) .* (\w+)\.py$", re.MULTILINE)
DIRECTORY = Path(strategies.__file__).parent


def stops() -> dict[tuple[str, str], str]:
    """By file and name of a function's code, what the map calls it."""
    found: dict[tuple[str, str], str] = {}
    for name, file in STOP.findall(strategies.__doc__ or ""):
        module = import_module(f"lightning_mgpu.strategies.{file}")
        here = [
            each for _, each in getmembers(module, isclass) if each.__module__ == module.__name__
        ]
        first, _, method = name.partition(".")
        owner = next((each for each in (module, *here) if first in vars(each)), None)
        assert owner is not None, f"{file}.py has no {first}"
        function = vars(owner)[first]
        if isclass(function):
            function = getattr(function, method or "__iter__")
        code = getattr(function, "__wrapped__", function).__code__
        assert Path(code.co_filename).stem == file
        found[file, code.co_name] = name
    return found


def walk() -> list[str]:
    """The stops of one batch. An `optimizer_step` calls the others first, then it updates."""
    by_code, seen = stops(), list[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        name = by_code.get((path.stem, frame.f_code.co_name))
        is_stop = event == ("return" if name == "optimizer_step" else "call")
        if name and is_stop and path.parent == DIRECTORY and name not in seen:
            seen.append(name)

    sys.setprofile(note)
    try:
        fit(Buffered, replicas=4, max_steps=1)
    finally:
        sys.setprofile(None)
    return seen


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", samples(1).tensors[1].clone())


def test_the_map_is_the_order_of_the_calls() -> None:
    names = list(stops().values())
    assert 8 <= len(names) <= 12
    assert run_in_processes(2, walk) == [names, names]
