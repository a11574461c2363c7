"""`benchmark compare A.json B.json`: what a change to the code has done to the speed."""

import json
from pathlib import Path
from typing import Any

from lightning_mgpu.benchmark.report import name_of
from lightning_mgpu.benchmark.summary import summarise
from lightning_mgpu.runs.errors import UsageError


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for every configuration measured in both: samples a second before and after, and their ratio.

    A ratio is `within the spread` where the ranges of the repeats overlap.
    """
    others = {json.dumps(result["configuration"], sort_keys=True): result for result in after["results"]}
    lines = [f"{'':<58}{'before':>10}{'after':>10}{'ratio':>8}"]
    for result in before["results"]:
        other = others.get(json.dumps(result["configuration"], sort_keys=True))
        old, new = summarise(result), summarise(other) if other else None
        if old is None or new is None:
            continue
        own = result["configuration"]
        name = f"{own['model']}, batch {own['batch_size']}: {name_of(own)}"
        overlaps = old.low <= new.high and new.low <= old.high
        note = "  within the spread" if overlaps else ""
        lines.append(f"{name:<58}{old.rate:>10,.0f}{new.rate:>10,.0f}{new.rate / old.rate:>8.2f}{note}")
    if len(lines) == 1:
        raise UsageError("the two reports have no configuration in common")
    different = [
        f"{key}: {before['machine'].get(key)} and {after['machine'].get(key)}"
        for key in ("cpu", "cores", "gpus", "malloc", "torch", "lightning")
        if before["machine"].get(key) != after["machine"].get(key)
    ]
    return [*lines, *(f"not the same machine: {difference}" for difference in different)]


def load(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        UsageError: If there is none, or the file is something else.
    """
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no report of the benchmark: {error}") from error
    if not isinstance(report, dict) or not {"results", "machine", "options"} <= report.keys():
        raise UsageError(f"{path} is no report of the benchmark: it has no results, machine and options")
    return report
