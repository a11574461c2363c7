"""`python -m lightning_mgpu runs`: the runs under a directory in one table, the newest last.

    python -m lightning_mgpu runs
    python -m lightning_mgpu runs sweeps/lenet_lr
    python -m lightning_mgpu runs --columns=model.lr,val_acc --sort=val_acc
    python -m lightning_mgpu runs --csv > runs.csv

The table has the options given to `fit` that differ, and the metrics of the best epoch (of the last
one where a run has not ended): as many as fit the terminal, metrics first. `--csv` has all.
"""

import re
import sys
from contextlib import suppress
from csv import writer
from math import isnan
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from lightning_mgpu.cli.errors import did_you_mean
from lightning_mgpu.runs.directory import RUN_JSON, read_run_json
from lightning_mgpu.runs.metrics import summarize
from lightning_mgpu.tools import UsageError, make_parser


def runs_command(args: list[str]) -> None:
    parser = make_parser("runs", __doc__)
    add = parser.add_argument
    add("directory", type=Path, nargs="?", default="runs", help="default: runs")
    add("--columns", type=lambda text: text.split(","), help="names of columns, in their order")
    add("--sort", metavar="COLUMN", help="its largest number comes last (default: the newest run)")
    add("--csv", action="store_true", help="every column and digit")
    options = parser.parse_args(args)
    if not (runs := find_runs(options.directory)):
        raise UsageError(f"{options.directory}: no run is in it, a directory with a {RUN_JSON}")
    table = {path: given | results for path, (given, results) in runs.items()}
    known = dict.fromkeys(name for row in table.values() for name in row)
    for name in (options.columns or []) + [options.sort] * bool(options.sort):
        if name not in known:
            raise UsageError(f"{name}: no run has this column. {did_you_mean(name, known)}")
    if options.sort:
        table = dict(sorted(table.items(), key=lambda item: rank(item[1].get(options.sort))))
    columns: dict[str, list[Any]] = {"run": [path.relative_to(options.directory) for path in table]}
    for name in options.columns or default_columns(runs):
        columns[name] = [row.get(name) for row in table.values()]
    if options.csv:
        writer(sys.stdout, lineterminator="\n").writerows([columns, *zip(*columns.values())])
        return
    free = get_terminal_size((1000, 0)).columns + 2  # in a file there are all
    lines = [""] * (len(table) + 1)
    for name, cells in columns.items():
        texts = [name, *map(shorten, cells)]
        width = max(map(len, texts)) + 2
        if width <= free or options.columns:
            free -= width
            lines = [line + text.ljust(width) for line, text in zip(lines, texts)]
    print("\n".join(map(str.rstrip, lines)))


def default_columns(runs: dict[Path, tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Metrics, and options that differ, of `fit`: `test` and `predict` add rows and no columns."""
    fits = [runs[path] for path in runs if " fit" in read_run_json(path).get("command", " fit")]
    fits = fits or [*runs.values()]
    names = {name: None for given, _ in fits for name in given}
    values = {name: {str(given.get(name)) for given, _ in fits} for name in names}
    differ = [name for name in names if len(values[name]) > 1 and name != "run_dir"]
    return [*{name: None for _, results in fits[::-1] for name in results}, *differ]


def find_runs(directory: Path) -> dict[Path, tuple[dict[str, Any], dict[str, Any]]]:
    """Options and results by run directory, the oldest first."""
    runs = {}
    contents = {path.parent: read_run_json(path.parent) for path in directory.rglob(RUN_JSON)}
    for path, content in sorted(contents.items(), key=lambda item: item[1].get("begin", "")):
        end = content.get("end") or {"state": "unfinished"}
        results = {**summarize(path), **end.get("metrics", {})}
        last = {name: end.get(name) for name in ("fingerprint", "state")}
        runs[path] = content.get("options", {}), {**results, **last}
    return runs


def rank(cell: Any) -> tuple[int, float, str]:
    """Where a cell is sorted: no value, text, number."""
    with suppress(TypeError, ValueError):
        if not isnan(number := float(cell)):
            return 2, number, ""
    return int(cell is not None), 0.0, str(cell)


def shorten(cell: Any) -> str:
    """Five digits, a class without its package, nothing for `None`."""
    if isinstance(cell, float):
        return f"{cell:.5g}"
    return "" if cell is None else re.sub(r"(\w+\.)+(?=[A-Z]\w*$)", "", str(cell))
