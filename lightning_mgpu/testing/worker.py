"""Runs cases on one device, then under a strategy, and judges: a process, and the children that the strategy starts.

`check.py` starts it. It adds what is wrong to a file, a line a case. It ends at the first case that raises, because
processes that were in step no longer are.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.probe import Kind

RESULTS = "results"


def main() -> None:
    order = json.loads(sys.argv[1])
    kind, directory, names = Kind(*order["kind"]), Path(order["directory"]), order["names"]
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # Lightning's launcher sets it

    def tell(**what: Any) -> None:
        with (directory / RESULTS).open("a") as file:
            file.write(json.dumps(what) + "\n")

    expected: dict[str, Any] = {}
    name, where = names[0], "one device: "
    try:
        for name in names if is_first else ():  # before the strategy starts processes: metrics would add up theirs
            promise = PROMISES[name]
            if promise.tolerance is not None:
                expected[name] = (promise.alone or promise.case)(Kind(accelerator=kind.accelerator), directory)
        where = ""
        for name in names:
            found = PROMISES[name].case(kind, directory)
            if is_first:
                tell(name=name, wrong=PROMISES[name].judge(found, expected.get(name)))
    except BaseException as error:
        text = " ".join(traceback.format_exception_only(type(error), error)[0].split())
        tell(name=name, wrong=f"{where}{text}", raised=True)
        os._exit(3)  # not waiting for processes that wait for this one
    if torch.distributed.is_initialized():  # gloo's threads may end a process with SIGABRT: pytorch/pytorch#179291
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
