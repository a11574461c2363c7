"""Judge a strategy: run the cases under it and on one device, in a process of their own.

That process is `main`, with the children that the strategy starts. It adds a line of JSON to a file
for every case: its name and what was wrong. It ends at the first case that raises: processes that
were in step no longer are.
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

from lightning_mgpu.processes import leave_group, process_group
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
        strategy: A name Lightning knows, or a dotted path to a Strategy class or function.
        promises: Keys of `PROMISES`.
        timeout: Seconds that all cases may take before the one that runs counts as hanging.
    """
    left = list(promises)
    while left:
        for name, wrong in _run_cases(Kind(strategy, devices, accelerator), left, timeout).items():
            left.remove(name)
            promise = PROMISES[name]
            of_all = CANNOT.get(("*", name), "") if devices > 1 else ""
            is_judged = devices > 1 or strategy == "auto"
            reason = CANNOT.get((strategy, name), of_all) if is_judged else ""
            wrong = "" if promise.error and promise.error in wrong else wrong
            yield Result(name, promise, wrong, NO_OPTION if wrong == NO_OPTION else reason)


def _run_cases(kind: Kind, names: Sequence[str], timeout: float) -> dict[str, str]:
    """What is wrong with each case, up to the one with which the process ends."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"}
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        order = json.dumps([astuple(kind), names, directory])
        command = [sys.executable, "-W", "ignore", "-m", __name__, order]
        with process_group(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:  # the output ends with the last process that the strategy has started
                output, _ = process.communicate(timeout=timeout)
                status, lines = (
                    process.returncode,
                    output.decode(errors="replace").strip().splitlines(),
                )
                stopped = f"ended with status {status}: {(lines or ['no output'])[-1]}"
            except subprocess.TimeoutExpired:
                status, stopped = (
                    None,
                    f"hangs, or leaves processes behind: not done after {timeout:g} s",
                )
        told: dict[str, str] = {}
        results = Path(directory, "results")
        for name, wrong in map(
            json.loads, results.read_text().splitlines() if results.exists() else ()
        ):
            told[name] = told.get(name) or wrong
    is_done, has_raised = status == 0 and len(told) == len(names), any(list(told.values())[-1:])
    if not is_done and not has_raised:  # the case that ran has said nothing
        told[next((name for name in names if name not in told), names[-1])] = stopped
    return told


def main() -> None:
    kind, names, directory = json.loads(sys.argv[1])
    kind, directory = Kind(*kind), Path(directory)
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # Lightning's launcher sets it

    def tell(name: str, wrong: str) -> None:
        with (directory / "results").open("a") as file:
            file.write(json.dumps([name, wrong]) + "\n")

    name, alone, expected = names[0], Kind(accelerator=kind.accelerator), {}
    try:
        # before the strategy starts processes: metrics would add up theirs
        for name in names if is_first else ():
            if (promise := PROMISES[name]).tolerance is not None:
                expected[name] = (promise.alone or promise.case)(alone, directory)
        for name in names:
            found = PROMISES[name].case(kind, directory)
            if is_first:
                tell(name, PROMISES[name].judge(found, expected.get(name)))
    except BaseException as error:
        tell(name, " ".join(traceback.format_exception_only(type(error), error)[0].split()))
        os._exit(3)  # not waiting for processes that wait for this one
    leave_group()


if __name__ == "__main__":
    main()
