"""Table, CSV and picture of made-up results."""

import csv
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.sweep.plan import Plan, read_parameter
from lightning_mgpu.sweep.report import _plot, metric_of, ranked, write_report

PARAMETERS = [
    read_parameter("lr", {"min": 0.01, "max": 1.0, "distribution": "log_uniform_values"}),
    read_parameter("optimizer", {"values": ["SGD", "AdamW"]}),
    read_parameter("epochs", {"value": 3}),
]


def plan(maximize: bool) -> Plan:
    return Plan("mine", "random", "val_acc", maximize, [], PARAMETERS, 5, [])


def result(trial: int, lr: float, optimizer: str, extremes: list[float], error: str | None = None) -> dict[str, Any]:
    values = {"lr": lr, "optimizer": optimizer, "epochs": 3}
    return {"trial": trial, "values": values, "seconds": 2.0, "error": error, "metrics": {"val_acc": extremes}}


RESULTS = [
    result(0, 0.5, "SGD", [], "diverged: a | b"),
    result(1, 0.02, "AdamW", [0.1, 0.5]),
    result(2, 0.1, "SGD", [0.2, 0.9]),
]


def test_best_first_by_the_goal() -> None:
    assert [each["trial"] for each in ranked(plan(True), RESULTS)] == [2, 1, 0]
    assert [each["trial"] for each in ranked(plan(False), RESULTS)] == [1, 2, 0]
    assert [metric_of(plan(False), each) for each in RESULTS] == [None, 0.1, 0.2]


def test_files(tmp_path: Path) -> None:
    text = write_report(plan(True), RESULTS, tmp_path, "the command")
    assert text == (tmp_path / "sweep.md").read_text()
    assert "mine: 3 of 5 trials, 1 failed, by `the command`. val_acc: the highest over the epochs" in text
    assert "In all trials: epochs=3." in text
    assert "| 2 | 0.1 | SGD | 0.9 | 2 |  |" in text and "| 0 | 0.5 | SGD |  | 2 | diverged: a \\| b |" in text
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["2", "1", "0"] and rows[0]["val_acc"] == "0.9"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("maximize", [True, False])
def test_picture(maximize: bool) -> None:
    lr, optimizer = _plot(plan(maximize), PARAMETERS[:2], RESULTS).axes
    assert lr.get_xscale() == "log" and optimizer.get_xscale() == "linear"
    assert [tick.get_text() for tick in optimizer.get_xticklabels()] == ["SGD", "AdamW"]
    trials, best, failed = lr.lines
    assert sorted(trials.get_xdata()) == [0.02, 0.1] and list(failed.get_xdata()) == [0.5]
    assert [*best.get_xdata(), *best.get_ydata()] == ([0.1, 0.9] if maximize else [0.02, 0.1])


def test_a_sweep_whose_trials_all_failed_has_a_report(tmp_path: Path) -> None:
    assert "1 of 5 trials, 1 failed" in write_report(plan(True), RESULTS[:1], tmp_path, "")
