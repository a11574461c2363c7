"""`benchmark compare A.json B.json`: what a change to the code has done to the speed."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.benchmark.plan import key_of
from lightning_mgpu.benchmark.report import steps
from lightning_mgpu.errors import UsageError

ABOUT = ("cpu", "cores", "gpus", "malloc", "torch", "lightning")


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for every configuration measured in both: samples a second before and after, and their ratio.

    A ratio is `within the spread` where the ranges of the repeats overlap.
    """
    others = {key_of(result["configuration"]): steps(result) for result in after["results"]}
    lines = [f"{'model/engine/devices/global batch':<50}{'before':>10}{'after':>10}{'ratio':>8}"]
    for result in before["results"]:
        key, old = key_of(result["configuration"]), steps(result)
        if old and (new := others.get(key)):
            a, b = (result["configuration"]["batch_size"] / statistics.median(each) for each in (old, new))
            note = "  within the spread" if min(old) <= max(new) and min(new) <= max(old) else ""
            lines.append(f"{key:<50}{a:>10,.0f}{b:>10,.0f}{b / a:>8.2f}{note}")
    if len(lines) == 1:
        raise UsageError("the two reports have no configuration in common")
    pairs = {name: (before["machine"].get(name), after["machine"].get(name)) for name in ABOUT}
    return [*lines, *(f"not the same machine: {name}: {a} and {b}" for name, (a, b) in pairs.items() if a != b)]


def load(path: str) -> dict[str, Any]:
    """Read a report.

    Raises:
        UsageError: If there is none, or the file is something else.
    """
    try:
        report = json.loads(Path(path).read_text())
        if {"results", "machine"} <= set(report):
            return dict(report)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError):
        pass
    raise UsageError(f"{path} is no report of the benchmark: it has no results and machine")


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        raise UsageError("benchmark compare takes two reports: benchmark compare A.json B.json")
    print("\n".join(compare(*map(load, arguments))))
