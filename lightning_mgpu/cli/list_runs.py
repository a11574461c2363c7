"""`python -m lightning_mgpu runs`: the runs under a directory in one table, the newest last.

    python -m lightning_mgpu runs
    python -m lightning_mgpu runs sweeps/lenet_lr
    python -m lightning_mgpu runs --csv > runs.csv

The table has the settings in which the runs differ, the metrics of the best epoch (of the last one
where a run has not ended, or nothing says which is the best), and the fingerprint of the weights.
"""

import os
import re
import sys
from csv import writer
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.commands import run_command
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import command
from lightning_mgpu.runs.checkpoint_file import flatten
from lightning_mgpu.runs.directory import find_registered_name
from lightning_mgpu.runs.run_json import find_state, read_metrics, read_run_json

LAST_COLUMNS = ("fingerprint", "seconds_per_epoch", "state")
CLASS_PATH = re.compile(r"(\w+\.)+(?=[A-Z]\w*$)")  # what stands before a class's name


def runs_command(args: list[str]) -> None:
    """Entry point of `python -m lightning_mgpu runs`."""
    options = [arg if arg.startswith("-") else f"--directory={arg}" for arg in args]
    run_command(list_runs, options, f"{command()} runs", __doc__)


def list_runs(directory: Path = Path("runs"), csv: bool = False) -> None:
    """Print the runs under a directory in one table, the newest last.

    Args:
        directory: Where the runs are, at any depth; `--directory=` may be left out.
        csv: Print CSV with every digit, for a spreadsheet.

    Raises:
        UsageError: If there is no run.
    """
    if not (run_dirs := find_runs(directory)):
        raise UsageError(f"{directory}: no run is in it, which is a directory with a config.yaml")
    settings, results = [*map(read_settings, run_dirs)], [*map(read_results, run_dirs)]
    metrics = {name for result in results for name in result if name not in LAST_COLUMNS}
    by_split = sorted(metrics, key=lambda name: (name.startswith("test"), name))
    columns = ["run", *find_differences(settings), *by_split, *LAST_COLUMNS]
    table: list[list[Any]] = [columns]
    for run_dir, setting, result in zip(run_dirs, settings, results):
        row = {"run": run_dir.relative_to(directory), **setting, **result}
        table.append([row.get(name) for name in columns])
    if csv:
        writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    texts = [[*map(shorten, row)] for row in table]
    widths = [max(map(len, column)) for column in zip(*texts)]
    for cells in texts:
        print("  ".join(map(str.ljust, cells, widths)).rstrip())


def find_runs(directory: Path) -> list[Path]:
    """The run directories in the order in which they began, those without `run.json` first."""
    began: dict[Path, tuple[str, float]] = {}
    for name, subdirectories, files in os.walk(directory):
        if "config.yaml" in files:
            subdirectories.clear()  # W&B keeps a config.yaml of its own in a run directory
            path = Path(name)
            written = (path / "config.yaml").stat().st_mtime
            began[path] = (read_run_json(path).get("begin", ""), written)
    return sorted(began, key=began.__getitem__)


def read_settings(run_dir: Path) -> dict[str, Any]:
    """A run's options by their names on the command line, without those that are `null`."""
    config = read_config(str(run_dir / "config.yaml"))
    settings = {name: value for name, value in flatten(config).items() if value is not None}
    strategy = (config.get("trainer") or {}).get("strategy")
    if isinstance(strategy, dict):  # `manual_allreduce` with options of its own is saved as a class
        init_args = Namespace(**(strategy.get("init_args") or {}))
        options = Namespace(class_path=strategy["class_path"], init_args=init_args)
        settings["trainer.strategy"] = find_registered_name(options)
    return settings


def find_differences(settings: list[dict[str, Any]]) -> list[str]:
    """The options in which runs differ, in the order of `config.yaml`.

    Classes differ in the options they have: `model.optimizer.betas` says nothing that
    `model.optimizer` does not, unless it differs between runs with the same optimizer.
    """
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if name != "run_dir" and differs(name, settings)]


def differs(name: str, settings: list[dict[str, Any]]) -> bool:
    """Whether an option has several values, or runs with the same classes have it and have not."""
    if len({str(each[name]) for each in settings if name in each}) > 1:
        return True
    parts = name.split(".")
    classes = [".".join(parts[:num]) for num in range(1, len(parts))]
    has_option: dict[str, set[bool]] = {}
    for each in settings:
        has_option.setdefault(str([*map(each.get, classes)]), set()).add(name in each)
    return any(len(found) > 1 for found in has_option.values())


def read_results(run_dir: Path) -> dict[str, Any]:
    """Metrics and the last columns: from `run.json`, or from `metrics.csv` what it lacks."""
    end = read_run_json(run_dir).get("end") or {}
    validation, test, seconds = read_metrics(run_dir)
    return {
        **(end.get("validation") or validation),
        **(end.get("test") or test),
        "fingerprint": end.get("fingerprint"),
        "seconds_per_epoch": end.get("seconds_per_epoch") or seconds,
        "state": find_state(run_dir),
    }


def shorten(value: Any) -> str:
    """A cell: four digits, a class without its package, nothing for `None`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else CLASS_PATH.sub("", str(value))
