"""`python -m lightning_mgpu runs`: the runs under a directory in one table, the newest last.

    python -m lightning_mgpu runs
    python -m lightning_mgpu runs sweeps/lenet_lr
    python -m lightning_mgpu runs --csv > runs.csv

The table has the settings with several values, the metrics of the best epoch (of the last one where
a run has not ended), and the fingerprint of the weights.
"""

import re
import sys
from csv import writer
from pathlib import Path
from typing import Any

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.directory import CONFIG, RUN_JSON, flatten, read_run_json
from lightning_mgpu.runs.metrics import summarize
from lightning_mgpu.tools import UsageError, make_parser

LAST_COLUMNS = ("seconds_per_epoch", "fingerprint", "state")


def runs_command(args: list[str]) -> None:
    parser = make_parser("runs", __doc__)
    parser.add_argument("directory", type=Path, nargs="?", default="runs", help="default: runs")
    parser.add_argument("--csv", action="store_true", help="every digit, for a spreadsheet")
    options = parser.parse_args(args)
    if not (runs := find_runs(options.directory)):
        raise UsageError(f"{options.directory}: no run is in it, a directory with a {RUN_JSON}")
    names = dict.fromkeys(name for settings, _ in runs.values() for name in settings)
    values = {name: {str(each.get(name)) for each, _ in runs.values()} for name in names}
    differ = [name for name in names if len(values[name]) > 1 and name != "run_dir"]
    metrics = {name for _, results in runs.values() for name in results} - {*LAST_COLUMNS}
    by_split = sorted(metrics, key=lambda name: (name.startswith("test"), name))
    columns = ["run", *differ, *by_split, *LAST_COLUMNS]
    table: list[list[Any]] = [columns]
    for path, (settings, results) in runs.items():
        row = {"run": path.relative_to(options.directory), **settings, **results}
        table.append([row.get(name) for name in columns])
    if options.csv:
        writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    texts = [[*map(shorten, cells)] for cells in table]
    widths = [max(map(len, column)) for column in zip(*texts)]
    for cells in texts:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())


def find_runs(directory: Path) -> dict[Path, tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and results by run directory, the oldest first; broken ones are named in a line."""
    runs = {}
    paths = {p.parent for p in directory.rglob(RUN_JSON) if p.with_name(CONFIG).is_file()}
    for path in sorted(paths, key=lambda path: read_run_json(path).get("begin", "")):
        try:
            settings = flatten(read_config(str(path / CONFIG)))
            end = read_run_json(path).get("end") or {}
            results = {**summarize(path), **(end.get("metrics") or {})}
        except UsageError as error:
            print(f"left out: {' '.join(str(error).split())}", file=sys.stderr)
            continue
        results |= {"fingerprint": end.get("fingerprint"), "state": end.get("state", "unfinished")}
        runs[path] = settings, results
    return runs


def shorten(cell: Any) -> str:
    """Four digits, a class without its package, nothing for `None`."""
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else re.sub(r"(\w+\.)+(?=[A-Z]\w*$)", "", str(cell))
