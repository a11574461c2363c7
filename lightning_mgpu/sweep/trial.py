"""One trial: `fit` in a process of its own, with a run directory of its own, and how it went."""

import csv
import math
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.runs.redact import redact

Metrics = dict[str, list[tuple[int, float]]]
"""(epoch from 1, value), by name."""
EXCEPTION = re.compile(r"([\w.]+\.)?\w*(Error|Exception)\b.*")  # as the last line of a traceback


def run_trial(arguments: Sequence[str], log: Path) -> str | None:
    """Run `fit`, its output in a file; returns what ended it in one line, `None` if it went well.

    On Ctrl-C the trial is stopped, with the processes it has started. Secrets in its output, of a traceback say, are
    hidden when it has ended.
    """
    command = [sys.executable, "-m", "lightning_mgpu", "fit", *arguments]
    output = log.open("w")  # before the block: Ctrl-C may come when there is no log yet
    try:
        with output:
            status = run_in_group(command, output)
    finally:
        log.write_text(redact(log.read_text(errors="replace")))
    return None if status == 0 else why_it_ended(log.read_text(), status)


def why_it_ended(output: str, status: int) -> str:
    """The one line that tells: this command line's own message, else an exception's last line, else the status."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    told = [
        line.removeprefix("error: ").removesuffix(" (--traceback shows where)")
        for line in lines
        if line.startswith("error: ")
    ]
    raised = [line for line in lines if EXCEPTION.fullmatch(line)]
    if status < 0:
        return f"ended by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    return next((found[-1] for found in (told, raised) if found), f"ended with status {status}")


def read_metrics(run_dir: Path) -> Metrics:
    """What a run has logged, by name in the order of time; nothing if it has logged nothing."""
    path = run_dir / "metrics.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = rows[0].keys() - {"epoch", "step"} if rows else set()
    metrics: Metrics = {name: [] for name in sorted(names)}
    epoch = 1
    for row in rows:
        if row.get("epoch"):  # some of Lightning's callbacks log without one
            epoch = int(float(row["epoch"])) + 1
        for name, points in metrics.items():
            if row[name]:
                points.append((epoch, float(row[name])))
    return metrics


def divergence(metrics: Metrics) -> str | None:
    """The first metric that is no number any more, in words."""
    wrong = [(epoch, name, x) for name, points in metrics.items() for epoch, x in points if not math.isfinite(x)]
    if not wrong:
        return None
    epoch, name, x = min(wrong)
    return f"diverged: {name} is {x}" + ("" if name.startswith("test_") else f" in epoch {epoch}")
