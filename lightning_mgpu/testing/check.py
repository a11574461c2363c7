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
    timeout: float = 600.0,
) -> Iterator[Result]:
    """Try out what a strategy promises.

    Args:
        strategy: A name Lightning knows, or a dotted path to a Strategy class or a function that returns a Strategy.
        devices: How many.
        promises: Keys of `PROMISES`.
        timeout: Seconds that the cases may take together before the one that runs counts as hanging.

    Yields:
        A `Result` for every promise.

    Raises:
        KeyError: For a promise nobody knows.
    """
    chosen = {name: PROMISES[name] for name in promises}
    while chosen:
        for name, wrong in _run_worker(Kind(strategy, devices, accelerator), list(chosen), timeout).items():
            promise = chosen.pop(name)  # a new worker tries what is left
            wrong = "" if promise.error and promise.error in wrong else wrong
            reason = CANNOT.get((strategy, name), CANNOT.get(("*", name), "")) if devices > 1 else ""
            yield Result(name, promise, wrong, NO_OPTION if wrong == NO_OPTION else reason)


def _run_worker(kind: Kind, names: Sequence[str], timeout: float) -> dict[str, str]:
    """What a worker finds wrong with each case, until it ends; of one case at least."""
    output, end = b"", ""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        order = {"kind": astuple(kind), "names": names, "directory": directory}
        command = [sys.executable, "-W", "ignore", "-m", "lightning_mgpu.testing.worker", json.dumps(order)]
        environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with process_group(command, env=environment, **pipes) as process:
            try:  # the output ends when the last process has ended that the strategy has started
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                end = "hangs" if process.poll() is None else "leaves processes behind"
                end = f"{end}: not done after {timeout:g} s"
        results = Path(directory, RESULTS)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    told: dict[str, str] = {}
    for line in lines:  # several processes may raise in a case
        told[line["name"]] = "; ".join(dict.fromkeys(filter(None, (told.get(line["name"]), line["wrong"]))))
    has_raised = any("raised" in line for line in lines)
    if not end and process.returncode != 0 and not has_raised:
        last = (output.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        end = f"ended with status {process.returncode}: {last}"
    if end:
        untold = [name for name in names if name not in told]
        told[untold[0] if untold and not has_raised else list(told)[-1]] = end
    return told
