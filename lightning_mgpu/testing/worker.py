"""Runs cases under one strategy, and writes what was seen to files: a process, and the children a strategy starts.

Started by `check.py`. It ends at the first case that raises, as processes that were in step no longer are, and where a
case takes too long.
"""

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.testing.cases import PROMISES
from lightning_mgpu.testing.promises import Kind


def write(path: Path, content: Any) -> None:
    """The file is whole or not there."""
    torch.save(content, part := path.with_name(f"{path.name}.part{_rank()}"))
    os.replace(part, path)


def main() -> None:
    order = json.loads(sys.argv[1])
    kind, directory, results = Kind(*order["kind"]), Path(order["directory"]), Path(order["results"])
    for number, case, arguments in order["cases"]:
        faulthandler.dump_traceback_later(order["timeout"], exit=True)
        options = {name: Kind(*value) for name, value in arguments.items()}
        try:
            seen = PROMISES[case].case(kind, directory, **options)
        except BaseException as error:
            text = " ".join(traceback.format_exception_only(type(error), error)[0].split())
            write(results / f"{number}.error.{_rank()}", text)
            os._exit(3)  # not waiting for processes that wait for this one
        if _rank() == 0:
            write(results / str(number), seen)
    faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized():  # gloo's threads may end a process with SIGABRT: pytorch/pytorch#179291
        torch.distributed.destroy_process_group()


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))  # Lightning's launcher sets it


if __name__ == "__main__":
    main()
