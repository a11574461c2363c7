"""Runs cases under one strategy, and writes what was seen to files: a process, and the children a strategy starts.

Started by `check.py`. It ends at the first case that raises, as processes that were in step no longer are.
"""

import argparse
import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.runs.files import replacing
from lightning_mgpu.runs.processes import leave_group
from lightning_mgpu.testing.cases import CASES, Kind


def write(path: Path, content: Any) -> None:
    with replacing(path) as part:
        torch.save(content, part)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("devices", type=int)
    parser.add_argument("accelerator")
    parser.add_argument("directory", type=Path, help="for checkpoints")
    parser.add_argument("results", type=Path, help="one file a case, by its number")
    parser.add_argument("cases", nargs="+", type=json.loads, help="[number, case, {argument: value}]")
    args = parser.parse_args()
    kind = Kind(args.strategy, args.devices, args.accelerator)
    for number, case, arguments in args.cases:
        if "before" in arguments:
            arguments["before"] = Kind(**arguments["before"])
        try:
            seen = CASES[case](kind, args.directory, **arguments)
        except BaseException as error:
            text = " ".join(traceback.format_exception_only(type(error), error)[0].split())
            write(args.results / f"{number}.error.{_rank()}", text)
            os._exit(3)  # not waiting for processes that wait for this one
        if _rank() == 0:
            write(args.results / str(number), seen)
    leave_group()


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))  # Lightning's launcher sets it


if __name__ == "__main__":
    main()
