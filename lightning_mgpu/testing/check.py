"""Judge a strategy: run the cases under it and on one device, in a process of their own.

That process runs `run_cases`, with the children that the strategy starts. For every case it adds a
line of JSON to a file: the case's name and what was wrong. It ends at the first case that raises,
because the processes of a strategy are then no longer in step.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from lightning_mgpu.processes import leave_group, process_group
from lightning_mgpu.testing.cases import CANNOT, NO_OPTION, PROMISES, Promise
from lightning_mgpu.testing.probe import StrategySpec


@dataclass(frozen=True)
class PromiseResult:
    """Whether a promise was kept.

    Args:
        wrong: The difference that was found; empty if there was none.
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
) -> Iterator[PromiseResult]:
    """Try out what a strategy promises; yields a `PromiseResult` for every promise.

    Args:
        strategy: A name Lightning knows, or a dotted path to a Strategy class or function.
        promises: Keys of `PROMISES`.
        timeout: Seconds that all cases may take before the one that runs counts as hanging.
    """
    spec, left = StrategySpec(strategy, devices, accelerator), list(promises)
    reasons = CANNOT.get(strategy, {}) if devices > 1 or strategy == "auto" else {}
    if devices > 1:
        reasons = {**CANNOT["*"], **reasons}
    while left:  # a new process after each case that raises
        for name, wrong in _run_in_process(spec, left, timeout).items():
            left.remove(name)
            promise = PROMISES[name]
            if promise.error and promise.error in wrong:
                wrong = ""
            reason = NO_OPTION if wrong == NO_OPTION else reasons.get(name, "")
            yield PromiseResult(name, promise, wrong, reason)


def _run_in_process(spec: StrategySpec, names: Sequence[str], timeout: float) -> dict[str, str]:
    """The faults of each case, by its name, up to the case with which the process ends."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        status, ending = _wait_for(json.dumps([astuple(spec), names, directory]), timeout)
        results = Path(directory, "results")
        lines = results.read_text().splitlines() if results.exists() else []
    wrong_by_name: dict[str, str] = {}
    for name, wrong in map(json.loads, lines):
        wrong_by_name[name] = wrong_by_name.get(name) or wrong
    is_done = status == 0 and len(wrong_by_name) == len(names)
    has_raised = any(list(wrong_by_name.values())[-1:])
    if not is_done and not has_raised:  # the case that ran has not said why
        name = next((name for name in names if name not in wrong_by_name), names[-1])
        wrong_by_name[name] = ending
    return wrong_by_name


def _wait_for(arguments: str, timeout: float) -> tuple[int | None, str]:
    """Run this file; returns the status, None if the process hangs, and how it ended, in words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
    for name in ("LOCAL_RANK", "WORLD_SIZE"):  # the process is not part of a launcher's group
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", __name__, arguments]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with process_group(command, env=environment, **streams) as process:
        try:  # the output ends with the last process that the strategy has started
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, f"hangs, or leaves processes behind: not done after {timeout:g} s"
    lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
    return process.returncode, f"ended with status {process.returncode}: {lines[-1]}"


def run_cases(spec: StrategySpec, names: Sequence[str], directory: Path) -> None:
    """Run cases under a strategy and on one device, and write what was wrong with each."""
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # Lightning's launcher sets it

    def write_result(name: str, wrong: str) -> None:
        with (directory / "results").open("a") as file:
            file.write(json.dumps([name, wrong]) + "\n")

    name, one_device, expected = names[0], StrategySpec(accelerator=spec.accelerator), {}
    try:
        # before the strategy starts processes: metrics would add up all of theirs
        for name in names if is_first else ():
            if (promise := PROMISES[name]).tolerance is not None:
                expected[name] = (promise.reference or promise.case)(one_device, directory)
        for name in names:
            observed = PROMISES[name].case(spec, directory)
            if is_first:
                write_result(name, PROMISES[name].judge(observed, expected.get(name)))
    except BaseException as error:
        message = traceback.format_exception_only(type(error), error)[0]
        write_result(name, " ".join(message.split()))
        os._exit(3)  # without waiting for processes that wait for this one
    leave_group()


if __name__ == "__main__":
    spec, names, directory = json.loads(sys.argv[1])
    run_cases(StrategySpec(*spec), names, Path(directory))
