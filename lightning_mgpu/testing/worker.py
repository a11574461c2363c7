"""Runs cases on one device, then under a strategy, and judges: a process, and the children that the strategy starts.

`check.py` starts it. It adds what is wrong to a file, a line a case. It ends at the first case that raises, as
processes that were in step no longer are, and where a case takes too long.
"""

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.promises import Case, Kind

RESULTS = "results"


def main() -> None:
    order = json.loads(sys.argv[1])
    kind, directory, names = Kind(*order["kind"]), Path(order["directory"]), order["names"]
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # Lightning's launcher sets it

    def tell(name: str, **what: str) -> None:
        with (directory / RESULTS).open("a") as file:
            file.write(json.dumps({"name": name, **what}) + "\n")

    def run(name: str, case: Case, kind: Kind, where: str = "") -> object:
        faulthandler.dump_traceback_later(order["timeout"], exit=True)
        try:
            return case(kind, directory)
        except BaseException as error:
            text = " ".join(traceback.format_exception_only(type(error), error)[0].split())
            tell(name, error=f"{where}{text}")
            os._exit(3)  # not waiting for processes that wait for this one

    alone = Kind(accelerator=kind.accelerator)
    expected = {  # before the strategy starts processes: metrics would add up what all of them saw
        name: run(name, PROMISES[name].alone or PROMISES[name].case, alone, "one device: ")
        for name in (names if is_first else ())
    }
    for name in names:
        found = run(name, PROMISES[name].case, kind)
        if is_first:
            tell(name, wrong=PROMISES[name].judge(found, expected[name]))
    if torch.distributed.is_initialized():  # gloo's threads may end a process with SIGABRT: pytorch/pytorch#179291
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
