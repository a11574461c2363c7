"""Judge a strategy: run the cases under it and on one device, in a process of their own (`worker.py`)."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from lightning_mgpu.runs.processes import process_group
from lightning_mgpu.testing.cases import CANNOT, PROMISES
from lightning_mgpu.testing.promises import NO_OPTION, Kind, Promise
from lightning_mgpu.testing.worker import RESULTS


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
    timeout: float = 120.0,
) -> Iterator[Result]:
    """Try out what a strategy promises.

    Args:
        strategy: A name Lightning knows, or a dotted path to a Strategy class or a function that returns a Strategy.
        devices: How many.
        promises: Keys of `PROMISES`.
        timeout: Seconds a case may take before it counts as hanging.

    Yields:
        A `Result` for every promise.

    Raises:
        KeyError: For a promise nobody knows.
    """
    chosen = {name: PROMISES[name] for name in promises}
    while chosen:
        told = _run_worker(Kind(strategy, devices, accelerator), list(chosen), timeout)
        for name in [name for name in chosen if name in told]:  # a new worker tries what is left
            promise, wrong = chosen.pop(name), told[name]
            wrong = "" if promise.error and promise.error in wrong else wrong
            reason = CANNOT.get((strategy, name), CANNOT.get(("*", name), "")) if devices > 1 else ""
            yield Result(name, promise, wrong, NO_OPTION if wrong == NO_OPTION else reason)


def _run_worker(kind: Kind, names: Sequence[str], timeout: float) -> dict[str, str]:
    """What a worker finds wrong with each case, until it ends; of one case at least."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        order = {"kind": astuple(kind), "names": names, "timeout": timeout, "directory": directory}
        command = [sys.executable, "-W", "ignore", "-m", "lightning_mgpu.testing.worker", json.dumps(order)]
        environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
        log, results = Path(directory, "log"), Path(directory, RESULTS)
        with log.open("wb") as output, process_group(command, stdout=output, stderr=output, env=environment) as process:
            status = process.wait()  # it ends by itself where a case takes too long
            leaves_processes = not _ends(process.pid)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        told: dict[str, str] = {}
        for line in lines:  # several processes may raise in a case
            text = line.get("wrong", line.get("error"))
            told[line["name"]] = "; ".join(dict.fromkeys(filter(None, (told.get(line["name"]), text))))
        last = next((name for name in names if name not in told), names[-1])
        if any("error" in line for line in lines):
            return told
        if status != 0:
            told[last] = _why(status, log.read_text(errors="replace"), timeout)
        elif leaves_processes:
            told[names[-1]] = "leaves processes behind"
        return told


def _why(status: int, output: str, timeout: float) -> str:
    lines = output.strip().splitlines()
    if any(line.startswith("Timeout (") for line in lines):  # faulthandler's
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
