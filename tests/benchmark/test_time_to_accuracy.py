"""Seconds until an accuracy: the arithmetic with a `fit` that ends at once, and a real one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.benchmark import time_to_accuracy
from lightning_mgpu.benchmark.time_to_accuracy import summary

METRICS = """epoch,epoch_seconds,step,train_loss,val_acc
0,,3,,0.7
0,2.0,3,1.5,
1,3.0,7,1.2,
2,,11,,0.9
2,4.0,11,1.0,
"""


def test_summary_over_seeds() -> None:
    runs = [
        {"epochs": [{"accuracy": 0.8, "seconds": t}, {"accuracy": last, "seconds": 2 * t}]}
        for t, last in ((1.0, 0.9), (2.0, 0.94))
    ]
    end = "accuracy at the end 0.9200 +- 0.0283"
    assert summary(runs, 0.9) == f"test accuracy 0.9: 3.0 +- 1.4 s of training over 2 seeds; {end}"
    assert summary(runs, 0.92) == f"test accuracy 0.92: reached by 1 of 2 seeds; {end}"


def test_a_run_for_every_seed_until_a_fit_fails(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    given: list[dict[str, str]] = []

    def run(command: list[str]) -> int:
        given.append(dict(argument.removeprefix("--").split("=", 1) for argument in command if "=" in argument))
        Path(given[-1]["run_dir"]).mkdir(parents=True)
        (Path(given[-1]["run_dir"]) / "metrics.csv").write_text(METRICS)
        return 3 if len(given) == 3 else 0

    monkeypatch.setattr(time_to_accuracy, "run_in_group", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    args = ("--target=0.9", "--seeds", "5", "6", "7", "--run_dir=tta", "--model.x=1")
    assert main("benchmark", "time_to_accuracy", *args) == 3
    assert [(run["seed_everything"], run["data.val_size"], run["model.x"]) for run in given] == [
        (seed, "0", "1") for seed in "567"
    ]
    assert "test accuracy 0.9: 9.0 +- 0.0 s of training over 2 seeds" in capsys.readouterr().out
    report = json.loads(Path("tta/time_to_accuracy.json").read_text())
    assert "--model.x=1" in report["command"] and [run["seed"] for run in report["runs"]] == [5, 6]
    assert report["runs"][0]["epochs"] == [
        {"epoch": 1, "accuracy": 0.7, "seconds": 2.0},
        {"epoch": 2, "seconds": 5.0},  # not validated
        {"epoch": 3, "accuracy": 0.9, "seconds": 9.0},
    ]


@pytest.mark.parametrize("args", [["--target=91"], ["--target=0.9", "--data.val_size=10"]])
def test_mistake_ends_in_one_line(
    args: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main("benchmark", "time_to_accuracy", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {args[-1].partition('=')[0]}") and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_real_fit(command: Callable, tmp_path: Path) -> None:
    small = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2")
    limits = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    args = ("--target=0.01", "--run_dir=tta", *small, *limits)
    code, out, err = command("benchmark", "time_to_accuracy", *args)
    assert code == 0 and "over 1 seeds" in out, err
    [run] = json.loads((tmp_path / "tta" / "time_to_accuracy.json").read_text())["runs"]
    assert [row["epoch"] for row in run["epochs"]] == [1, 2] and run["epochs"][0]["seconds"] > 0
