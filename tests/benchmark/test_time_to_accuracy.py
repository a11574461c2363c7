"""Seconds until an accuracy: the arithmetic with a clock of our own, and the command."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mgpu.benchmark.time_to_accuracy import AccuracyClock, first_reached, summarise, to_line


def epochs(*rows: tuple[float, float, float]) -> list[dict[str, float]]:
    names = ("accuracy", "seconds", "seconds_with_validation")
    return [{"epoch": n, **dict(zip(names, row))} for n, row in enumerate(rows, start=1)]


def test_clock_stops_for_validation(tmp_path: Path) -> None:
    """Train 10 s, validate 3 s, write 1 s; and again, with a validation in the middle of the epoch."""
    now = 0.0
    clock = AccuracyClock(str(tmp_path / "clock.json"), lambda: now)
    strategy = SimpleNamespace(root_device=torch.device("cpu"), parallel_devices=None)
    trainer: Any = SimpleNamespace(strategy=strategy, num_nodes=1, is_global_zero=True, sanity_checking=True)

    def validate(accuracy: float, seconds: float) -> None:
        nonlocal now
        trainer.callback_metrics = {"val_acc": torch.tensor(accuracy)}
        clock.on_validation_start(trainer, None)
        now += seconds
        clock.on_validation_end(trainer, None)

    validate(0.99, 100)  # the sanity check
    trainer.sanity_checking = False
    clock.on_train_start(trainer, None)
    for epoch, stretches in enumerate(([10.0], [4.0, 6.0])):
        trainer.current_epoch = epoch
        clock.on_train_epoch_start(trainer, None)
        for seconds in stretches:
            now += seconds
            validate(0.5 + epoch / 4, 3)
        now += 1
    rows = json.loads((tmp_path / "clock.json").read_text())
    assert rows == clock.epochs
    assert [row["epoch"] for row in rows] == [1, 2, 2]
    assert [row["accuracy"] for row in rows] == [0.5, 0.75, 0.75]
    assert [row["seconds"] for row in rows] == [10, 14, 20]
    assert [row["seconds_with_validation"] for row in rows] == [13, 21, 30]


def test_first_epoch_that_reaches_the_target() -> None:
    rows = epochs((0.8, 1, 2), (0.9, 2, 4), (0.85, 3, 6), (0.95, 4, 8))
    assert first_reached(rows, 0.9) == rows[1]
    assert first_reached(rows, 0.901) == rows[3]
    assert first_reached(rows, 0.96) is None


def test_summary_over_seeds() -> None:
    runs = [
        {"seed": 0, "epochs": epochs((0.8, 1, 2), (0.9, 2, 4))},
        {"seed": 1, "epochs": epochs((0.9, 4, 8), (0.92, 5, 9))},
    ]
    summary = summarise(runs, 0.9)
    assert summary["num_seeds"] == summary["num_reached"] == 2
    assert summary["seconds"] == {"mean": 3, "spread": pytest.approx(2**0.5)}
    assert summary["seconds_with_validation"] == {"mean": 6, "spread": pytest.approx(8**0.5)}
    assert summary["last_accuracy"]["mean"] == pytest.approx(0.91)
    assert to_line(summary, 0.9) == (
        "test accuracy 0.9: 3.0 +- 1.4 s (validation excluded), 6.0 +- 2.8 s (included) over 2 seeds; "
        "accuracy at the end 0.9100 +- 0.0141"
    )


def test_a_seed_that_does_not_reach_it_leaves_no_mean() -> None:
    runs = [{"seed": 0, "epochs": epochs((0.8, 1, 2))}, {"seed": 1, "epochs": epochs((0.9, 4, 8))}]
    summary = summarise(runs, 0.9)
    assert summary["num_reached"] == 1 and "seconds" not in summary
    assert to_line(summary, 0.9).startswith("test accuracy 0.9: reached by 1 of 2 seeds; accuracy at the end 0.85")


@pytest.mark.slow
def test_command(command: Any, main: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    small = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2")
    limits = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    args = ("--target=0.01", "--seeds", "3", "--run_dir=tta", *small, *limits)
    code, out, err = command("benchmark", "time_to_accuracy", *args)
    assert code == 0, err
    report = json.loads((tmp_path / "tta" / "time_to_accuracy.json").read_text())
    [run] = report["runs"]
    assert run["seed"] == 3 and [row["epoch"] for row in run["epochs"]] == [1, 2]
    assert report["seconds"]["mean"] == run["epochs"][0]["seconds"] > 0
    assert 0 < run["epochs"][0]["seconds"] < run["epochs"][0]["seconds_with_validation"]
    assert report["machine"]["malloc"] == "default" and report["target"] == 0.01
    assert to_line({**report}, 0.01) in out and "val_size: 0" in (tmp_path / "tta/seed_3/config.yaml").read_text()
    assert main("benchmark", "time_to_accuracy", *args) == 2
    assert "--run_dir=tta exists" in capfd.readouterr().err
    assert main("benchmark", "time_to_accuracy", "--target=0.5", "--run_dir=none", "--model=LeNett") == 2
    assert "did you mean LeNet" in capfd.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_sigterm_ends_the_run_under_way_and_keeps_the_seeds_before(command: Any, tmp_path: Path) -> None:
    small = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2")
    limits = ("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2", "--trainer.limit_test_batches=0.1")
    run_dir = tmp_path / "tta"
    args = ("--target=0.01", "--seeds", "3", "4", f"--run_dir={run_dir}", *small, *limits)
    process = command.start("benchmark", "time_to_accuracy", *args)
    killer = threading.Timer(120, process.kill)
    killer.start()
    while (line := process.stdout.readline()) and "seed_4" not in line:
        pass
    killer.cancel()
    process.terminate()
    code, out, err = command.finish(process, 60)
    assert code == 128 + signal.SIGTERM, err
    assert [run["seed"] for run in json.loads((run_dir / "time_to_accuracy.json").read_text())["runs"]] == [3]
    assert "over 1 seeds" in out
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in commands if bytes(run_dir) in line], "a fit was left behind"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--target"]),
        (["--target=91"], ["--target=91", "fraction"]),
        (["--target=0.9", "--data.val_size=10"], ["--data.val_size"]),
        (["--target=0.9", "--seed_everything=1"], ["--seed_everything", "--seeds"]),
        (["--target=0.9", "--seeds", "one"], ["--seeds", "one"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str], words: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main("benchmark", "time_to_accuracy", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert list(tmp_path.iterdir()) == []
