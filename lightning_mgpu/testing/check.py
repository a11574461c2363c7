"""Judge a strategy: run the cases under it and on one device, in processes of their own, and compare."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.testing.cases import CANNOT, PROMISES
from lightning_mgpu.testing.promises import NO_OPTION, Kind, Promise

Spec = tuple[str, dict[str, Any]]
"""A case, and the fields of kinds that it takes as further arguments."""


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


@dataclass(frozen=True)
class Seen:
    """What a case showed, or the error it ended with."""

    value: Any = None
    error: str = ""


def check_strategy(
    strategy: str,
    devices: int,
    accelerator: str = "cpu",
    promises: Sequence[str] = tuple(PROMISES),
    timeout: float = 120.0,
) -> Iterator[Result]:
    """Try out what a strategy promises.

    Args:
        strategy: A name Lightning knows, or a dotted path to a Strategy class or a function that returns a Strategy.
        devices: How many.
        promises: Keys of `PROMISES`.
        timeout: Seconds a case may take before it counts as hanging.

    Yields:
        A `Result` for every promise, in order.

    Raises:
        KeyError: For a promise nobody knows.
    """
    chosen = {name: PROMISES[name] for name in promises}
    directory, expected = _one_device(accelerator, list(chosen))
    found = run_cases(Kind(strategy, devices, accelerator), [(name, {}) for name in chosen], directory, timeout)
    for (name, promise), seen in zip(chosen.items(), found):
        wrong = _wrong(name, promise, seen, expected)
        reason = CANNOT.get((strategy, name), CANNOT.get(("*", name), "")) if devices > 1 else ""
        yield Result(name, promise, wrong, NO_OPTION if wrong == NO_OPTION else reason)


@functools.cache
def _memory(accelerator: str) -> tuple[tempfile.TemporaryDirectory, dict[str, Seen]]:
    """The directory with one device's checkpoints, and what it has shown so far: nothing yet."""
    return tempfile.TemporaryDirectory(prefix="conformance-"), {}


def _one_device(accelerator: str, cases: Sequence[str]) -> tuple[Path, dict[str, Seen]]:
    """The directory with one device's checkpoints, and what it shows in the cases, each of which it runs once."""
    directory, seen = _memory(accelerator)
    needed = dict.fromkeys("save" if case == "resume" else case for case in cases)
    new = [case for case in needed if case not in seen and case not in ("error", "any_devices")]
    seen |= zip(new, run_cases(Kind(accelerator=accelerator), [(case, {}) for case in new], Path(directory.name)))
    return Path(directory.name), seen


def _wrong(name: str, promise: Promise, found: Seen, expected: dict[str, Seen]) -> str:
    alone = expected.get("save" if name == "resume" else name, Seen())
    if name == "error":
        return promise.judge(found.error or "no error at all", None)
    if alone.error:
        return f"one device: {alone.error}"
    return found.error or promise.judge(found.value, alone.value)


def run_cases(kind: Kind, specs: Sequence[Spec], directory: Path, timeout: float = 120.0) -> list[Seen]:
    """Run cases under a strategy, one after the other; a worker that ends or hangs is replaced for those that are left.

    Args:
        directory: Where cases leave checkpoints for one another.
        timeout: Seconds for each case.
    """
    seen: list[Seen] = []
    while len(seen) < len(specs):
        left = [(number, *specs[number]) for number in range(len(seen), len(specs))]
        with tempfile.TemporaryDirectory(dir=directory) as results:
            problem = _run_worker(kind, left, directory, Path(results), timeout)
            while len(seen) < len(specs) and (path := Path(results) / str(len(seen))).exists():
                seen.append(Seen(torch.load(path, weights_only=False)))
            if len(seen) < len(specs):  # the one it ended with
                errors = dict.fromkeys(torch.load(path) for path in sorted(Path(results).glob(f"{len(seen)}.error.*")))
                seen.append(Seen(error="; ".join(errors) or problem or "no result"))
            elif problem:
                seen[-1] = Seen(error=problem)
    return seen


def _run_worker(kind: Kind, cases: Sequence[Any], directory: Path, results: Path, timeout: float) -> str:
    """Start a worker and see it end; returns what went wrong with it as a process."""
    order = {"kind": astuple(kind), "cases": cases, "timeout": timeout}
    order |= {"directory": str(directory), "results": str(results)}
    command = [sys.executable, "-W", "ignore", "-m", "lightning_mgpu.testing.worker", json.dumps(order)]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
    log = results / "log"
    with log.open("wb") as output:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, start_new_session=True, env=environment, **files)
    try:
        status = process.wait(60 + timeout * len(cases))  # it ends by itself where a case takes too long
        left_behind = not _ends(process.pid)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status in (0, 3):
        return "leaves processes behind" if left_behind else ""
    lines = log.read_text(errors="replace").strip().splitlines()
    if any(line.startswith("Timeout (") for line in lines):
        return f"hangs: nothing for {timeout:.0f} s"
    return f"ended with status {status}: {lines[-1] if lines else 'no output'}"


def _ends(group: int) -> bool:
    """Whether the processes of a group are gone, or go within ten seconds."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
