"""Judge a strategy: run the cases under it and on one device, in processes of their own, and compare."""

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.runs.processes import process_group
from lightning_mgpu.testing.cases import Kind
from lightning_mgpu.testing.promises import PROMISES, Promise

Spec = tuple[str, dict[str, Any]]
"""A case and its arguments beside the kind and the directory."""


@dataclass(frozen=True)
class Result:
    """Whether a promise was kept, and what was wrong if not."""

    name: str
    promise: Promise
    wrong: str

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
    directory, expected = _one_device(accelerator, [promise.case for promise in chosen.values()])
    cases: list[Spec] = [(promise.case, {}) for promise in chosen.values()]
    found = run_cases(Kind(strategy, devices, accelerator), cases, Path(directory.name), timeout)
    for (name, promise), seen in zip(chosen.items(), found):
        yield Result(name, promise, _wrong(promise, seen, expected[promise.case]))


@functools.cache
def _seen_on_one_device(accelerator: str) -> tuple[tempfile.TemporaryDirectory, dict[str, Seen]]:
    """The directory with one device's checkpoints, and what it has shown so far, by case: nothing yet."""
    return tempfile.TemporaryDirectory(prefix="conformance-"), {}


def _one_device(accelerator: str, cases: Sequence[str]) -> tuple[tempfile.TemporaryDirectory, dict[str, Seen]]:
    """What one device shows in some cases, each run once for all strategies, and the directory with its checkpoints."""
    directory, seen = _seen_on_one_device(accelerator)
    comparable = ["save" if case == "resume" else case for case in cases if case != "error"]
    new = [case for case in dict.fromkeys(comparable) if case not in seen]
    seen.update(zip(new, run_cases(Kind(accelerator=accelerator), [(case, {}) for case in new], Path(directory.name))))
    return directory, {case: seen.get("save" if case == "resume" else case, Seen()) for case in cases}


def _wrong(promise: Promise, found: Seen, expected: Seen) -> str:
    if promise.case == "error":
        return promise.judge(found.error or "no error at all", None)
    if expected.error:
        return f"one device: {expected.error}"
    return found.error or promise.judge(found.value, expected.value)


def run_cases(kind: Kind, specs: Sequence[Spec], directory: Path, timeout: float = 120.0) -> list[Seen]:
    """Run cases under a strategy, one after the other; a worker that ends or hangs is replaced for those that are left.

    Args:
        directory: Where cases leave checkpoints for one another.
        timeout: Seconds for each case.
    """
    seen: list[Seen] = []
    numbered = [json.dumps([number, *spec]) for number, spec in enumerate(specs)]
    while left := numbered[len(seen) :]:
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


def _run_worker(kind: Kind, specs: list[str], directory: Path, results: Path, timeout: float) -> str:
    """Start a worker and see it end; returns what went wrong with it as a process."""
    arguments = [kind.strategy, str(kind.devices), kind.accelerator, str(directory), str(results), *specs]
    command = [sys.executable, "-W", "ignore", "-m", "lightning_mgpu.testing.worker", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
    log = results / "log"
    with log.open("wb") as output, process_group(command, stdout=output, stderr=output, env=environment) as process:
        deadline = time.monotonic() + 60  # to start
        known = 0
        while process.poll() is None:
            if (done := sum(1 for _ in results.iterdir())) != known:
                known, deadline = done, time.monotonic() + timeout
            if time.monotonic() > deadline:
                return f"hangs: nothing for {timeout:.0f} s"
            time.sleep(0.02)
        if not _wait_for(lambda: not _is_alive(process.pid), seconds=10):
            return "leaves processes behind"
    if process.returncode in (0, 3):
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"ended with status {process.returncode}: {lines[-1] if lines else 'no output'}"


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true
