"""List the runs under a directory in a table, the newest last.

    python -m lightning_mgpu runs sweeps/lenet_lr
    python -m lightning_mgpu runs --columns=model.lr,val_acc --sort=val_acc
    python -m lightning_mgpu runs --csv > runs.csv

Columns are the metrics of the best epoch (of the last epoch, if a run has not ended) and the `fit`
options that differ between runs, as many as fit the terminal. `--csv` prints all columns.
"""

import re
import sys
from csv import writer
from math import inf
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from lightning_mgpu.runs.directory import RUN_JSON, read_run_json
from lightning_mgpu.runs.metrics import summarize
from lightning_mgpu.tools import UsageError, make_parser, printable


def runs_command(args: list[str]) -> None:
    parser = make_parser("runs", __doc__)
    add = parser.add_argument
    add("directory", type=Path, nargs="?", default="runs", help="directory of runs (default: runs)")
    add("--columns", metavar="A,B", help="columns to print, in this order")
    add("--sort", metavar="A", help="column to sort by, the largest value last (default: time)")
    add("--csv", action="store_true", help="print all columns and digits as CSV")
    options = parser.parse_args(args)
    if not (runs := find_runs(options.directory)):
        raise UsageError(f"{options.directory}: contains no run (a directory with a {RUN_JSON})")
    rows = [{"run": path.relative_to(options.directory), **runs[path]} for path in runs]
    chosen = (options.columns or "").replace(".init_args", "")  # as a YAML file names them
    names = chosen.split(",") if chosen else default_columns(runs)
    if unknown := {*names, options.sort or "run"} - {name for row in rows for name in row}:
        raise UsageError(f"no run has a column {unknown.pop()}: `runs --csv` lists all columns")
    rows.sort(key=lambda row: number(row.get(options.sort)))
    columns = {name: [row.get(name) for row in rows] for name in ("run", *names)}
    if options.csv:
        table = [columns, *zip(*columns.values())]
        clean = [[cell and printable(cell) for cell in row] for row in table]
        writer(sys.stdout, lineterminator="\n").writerows(clean)
        return
    free = get_terminal_size((1000, 0)).columns + 2  # all columns if written to a file
    lines = [""] * (len(rows) + 1)
    for name, cells in columns.items():
        texts = [*map(printable, (name, *map(shorten, cells)))]
        width = max(map(len, texts)) + 2
        if width <= free or options.columns:
            free -= width
            lines = [line + text.ljust(width) for line, text in zip(lines, texts)]
    print("\n".join(map(str.rstrip, lines)))


def find_runs(directory: Path) -> dict[Path, dict[str, Any]]:
    """Options and results by run directory, oldest first."""
    runs = {}
    contents = {path.parent: read_run_json(path.parent) for path in directory.rglob(RUN_JSON)}
    for path, content in sorted(contents.items(), key=lambda item: item[1].get("begin", "")):
        end = content.get("end") or {"state": "unfinished"}
        last = {name: end.get(name) for name in ("fingerprint", "state")}
        results = {**summarize(path), **end.get("metrics", {}), **last}
        runs[path] = content.get("options", {}) | results
    return runs


def default_columns(runs: dict[Path, dict[str, Any]]) -> list[str]:
    """Metrics, and options that differ between `fit` runs: other subcommands have fewer options."""
    contents = {path: read_run_json(path) for path in runs}
    fits = [path for path in runs if " fit" in contents[path].get("command", " fit")] or [*runs]
    options = dict.fromkeys(name for path in fits for name in contents[path].get("options", {}))
    metrics = dict.fromkeys(name for path in fits[::-1] for name in runs[path])
    values = {name: {str(runs[path].get(name)) for path in fits} for name in options}
    differ = [name for name in options if len(values[name]) > 1 and name != "run_dir"]
    return [*(name for name in metrics if name not in options), *differ]


def number(cell: Any) -> float:
    """The sort key of a cell: strings and NaN come first."""
    is_number = re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", str(cell))
    return float(cell) if is_number else -inf


def shorten(cell: Any) -> str:
    """Five digits, a class without its package, nothing for `None`."""
    if isinstance(cell, float):
        return f"{cell:.5g}"
    return "" if cell is None else re.sub(r"(\w+\.)+(?=[A-Z]\w*$)", "", str(cell))
