"""Judge a strategy: run the cases under it and on one device, in a process of their own (`worker.py`)."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from lightning_mgpu.runs.processes import process_group
from lightning_mgpu.testing.cases import CANNOT, NO_OPTION, PROMISES, Promise
from lightning_mgpu.testing.probe import Kind


@dataclass(frozen=True)
class Result:
    """Whether a promise was kept.

    Args:
        wrong: What was wrong, or nothing.
        reason: Why the strategy cannot keep the promise by its nature; nothing if it should.
    """

    name: str
    promise: Promise
    wrong: str
    reason: str = ""

    @property
    def is_kept(self) -> bool:
        return not self.wrong


def check_strategy(
    strategy: str,
    devices: int,
    accelerator: str = "cpu",
    promises: Sequence[str] = tuple(PROMISES),
    timeout: float = 600.0,
) -> Iterator[Result]:
    """Try out what a strategy promises; yields a `Result` for every promise.

    Args:
        strategy: A name Lightning knows, or a dotted path to a Strategy class or a function that returns a Strategy.
        promises: Keys of `PROMISES`; a `KeyError` for others.
        timeout: Seconds that the cases may take together before the one that runs counts as hanging.
    """
    left = {name: PROMISES[name] for name in promises}
    while left:  # a worker ends at a case that raises: a new one tries what is left
        for name, wrong in _run_worker(Kind(strategy, devices, accelerator), list(left), timeout).items():
            promise = left.pop(name)
            wrong = "" if promise.error and promise.error in wrong else wrong
            reason = CANNOT.get((strategy, name), CANNOT.get(("*", name), "")) if devices > 1 else ""
            yield Result(name, promise, wrong, NO_OPTION if wrong == NO_OPTION else reason)


def _run_worker(kind: Kind, names: Sequence[str], timeout: float) -> dict[str, str]:
    """What is wrong with each case, up to the one with which the worker ends."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        order = {"kind": astuple(kind), "names": names, "directory": directory}
        command = [sys.executable, "-W", "ignore", "-m", "lightning_mgpu.testing.worker", json.dumps(order)]
        environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        hangs, output, told = "", b"", dict[str, str | None]()
        (results := Path(directory, "results")).touch()
        with process_group(command, env=environment, **pipes) as process:
            try:  # the output ends with the last process that the strategy has started
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                hangs = f"hangs, or leaves processes behind: not done after {timeout:g} s"
        for name, wrong in map(json.loads, results.read_text().splitlines()):
            told[name] = told.get(name) or wrong
    last = list(told)[-1] if told else names[0]
    if hangs:
        told[last] = hangs
    elif not told.get(last) and (process.returncode or told.get(last) is None):
        end = (output.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        told[last] = f"ended with status {process.returncode}: {end}"
    return {name: wrong or "" for name, wrong in told.items()}
