"""Seconds until an accuracy: the arithmetic, and the command, with its `fit` in this process."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.benchmark import time_to_accuracy
from lightning_mgpu.benchmark.time_to_accuracy import summary


def test_summary_over_seeds() -> None:
    runs = [
        {"epochs": [{"accuracy": 0.8, "seconds": t}, {"accuracy": last, "seconds": 2 * t}]}
        for t, last in ((1.0, 0.9), (2.0, 0.94))
    ]
    end = "accuracy at the end 0.9200 +- 0.0283"
    assert summary(runs, 0.9) == f"test accuracy 0.9: 3.0 +- 1.4 s of training over 2 seeds; {end}"
    assert summary(runs, 0.92) == f"test accuracy 0.92: reached by 1 of 2 seeds; {end}"


def test_a_run_for_every_seed_until_a_fit_fails(
    main: Callable[..., int], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    given: list[dict[str, str]] = []

    def run(command: list[str]) -> int:
        given.append(dict(argument.removeprefix("--").split("=", 1) for argument in command if "=" in argument))
        return 3 if len(given) == 3 else main(*command[3:])

    monkeypatch.setattr(time_to_accuracy, "run_in_group", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    args = ("--target=0.01", "--seeds", "5", "6", "7", "--run_dir=tta", f"--data.root={root}", "--trainer.devices=1")
    short = ("--trainer.accelerator=cpu", "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2")
    assert main("benchmark", "time_to_accuracy", *args, *short) == 3
    assert [(run["seed_everything"], run["data.val_size"]) for run in given] == [("5", "0"), ("6", "0"), ("7", "0")]
    assert re.search(r"test accuracy 0\.01: .* s of training over 2 seeds", capsys.readouterr().out)
    report = json.loads(Path("tta/time_to_accuracy.json").read_text())
    assert "--trainer.max_epochs=3" in report["command"] and [run["seed"] for run in report["runs"]] == [5, 6]
    first, second, third = report["runs"][0]["epochs"]
    assert 0 < first["seconds"] < second["seconds"] < third["seconds"]
    assert ["accuracy" in epoch for epoch in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize("args", [["--target=91"], ["--target=0.9", "--data.val_size=10"]])
def test_mistake_ends_in_one_line(args: list[str], main: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert main("benchmark", "time_to_accuracy", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {args[-1].partition('=')[0]}") and list(tmp_path.iterdir()) == []
