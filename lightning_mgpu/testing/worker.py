"""Runs cases on one device, then under a strategy, and judges: a process, and the children that the strategy starts.

It adds lines of JSON to a file: the name of a case and `null` as it begins, then the name and what was wrong with it.
It ends at the first case that raises: processes that were in step no longer are.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from lightning_mgpu.runs.processes import leave_group
from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.probe import Kind


def main() -> None:
    order = json.loads(sys.argv[1])
    kind, directory, names = Kind(*order["kind"]), Path(order["directory"]), order["names"]
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # Lightning's launcher sets it

    def tell(name: str, wrong: str | None) -> None:
        with (directory / "results").open("a") as file:
            file.write(json.dumps([name, wrong]) + "\n")

    name, alone, expected = names[0], Kind(accelerator=kind.accelerator), {}
    try:
        for name in names if is_first else ():  # before the strategy starts processes: metrics would add up theirs
            if (promise := PROMISES[name]).tolerance is not None:
                expected[name] = (promise.alone or promise.case)(alone, directory)
        for name in names:
            if is_first:
                tell(name, None)
            found = PROMISES[name].case(kind, directory)
            if is_first:
                tell(name, PROMISES[name].judge(found, expected.get(name)))
    except BaseException as error:
        tell(name, " ".join(traceback.format_exception_only(type(error), error)[0].split()))
        os._exit(3)  # not waiting for processes that wait for this one
    leave_group()


if __name__ == "__main__":
    main()
