"""`runs`: one table of the runs under a directory, from `run.json` and without it."""

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.cli.list_runs import find_differences
from lightning_mgpu.files import to_yaml
from lightning_mgpu.runs.directory import lock_run_dir
from lightning_mgpu.runs.run_json import RunJson, to_json

SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "betas": [0.9, 0.999]}}
ROWS = "epoch,epoch_seconds,train_loss,val_acc,val_loss\n0,,,0.5,2.0\n0,3.0,2.1,,\n1,,,0.75,\n"


def make_run(run_dir: Path, optimizer: dict[str, Any], **trainer: Any) -> Path:
    run_dir.mkdir(parents=True)
    model = {"class_path": "my_package.models.Net", "init_args": {"optimizer": optimizer}}
    config = {"seed_everything": 42, "trainer": trainer, "model": model, "run_dir": None}
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return run_dir


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Runs in every state: of an older version, finished, interrupted, running."""
    runs = tmp_path / "runs"
    (make_run(runs / "older", SGD, max_epochs=2) / "metrics.csv").write_text(ROWS)
    finished = RunJson(make_run(runs / "sweep" / "trial_000", ADAMW, max_epochs=2), {})
    (finished.path.parent / "wandb").mkdir()
    (finished.path.parent / "wandb" / "config.yaml").write_text("of: W&B\n")
    results: dict[str, Any] = {"fingerprint": "0955842d504b", "seconds_per_epoch": 2.5}
    results |= {"validation": {"val_acc": 0.25}, "test": {"test_acc": 0.123456}}
    finished.write_end(None, results)
    RunJson(make_run(runs / "killed", SGD, max_epochs=3), {})
    RunJson(make_run(runs / "running", SGD, max_epochs=3), {})
    lock = lock_run_dir(runs / "running")
    yield runs
    os.close(lock)


def test_the_table(runs: Path, main: Callable[..., int], capfd: pytest.CaptureFixture) -> None:
    """Settings that differ, metrics, state; the newest run is last."""
    assert main("runs") == 0
    header, *rows = capfd.readouterr().out.splitlines()
    assert header.split() == [
        *("run", "trainer.max_epochs", "model.optimizer"),
        *("val_acc", "val_loss", "test_acc", "fingerprint", "seconds_per_epoch", "state"),
    ]
    assert [row.split() for row in rows] == [
        ["older", "2", "SGD", "0.75", "2", "3"],
        ["sweep/trial_000", "2", "AdamW", "0.25", "0.1235", "0955842d504b", "2.5", "finished"],
        ["killed", "3", "SGD", "interrupted"],
        ["running", "3", "SGD", "running"],
    ]
    assert {row.index(word) for row, word in zip(rows, ("SGD", "AdamW", "SGD"))} == {
        header.index("model.optimizer")
    }


def test_csv_has_every_digit_and_the_whole_class(
    runs: Path, main: Callable[..., int], capfd: pytest.CaptureFixture
) -> None:
    assert main("runs", str(runs / "sweep"), "--csv") == 0
    (row,) = csv.DictReader(capfd.readouterr().out.splitlines())
    assert (row["run"], row["test_acc"]) == ("trial_000", "0.123456")
    assert main("runs", "--csv") == 0
    _, row, *_ = csv.DictReader(capfd.readouterr().out.splitlines())
    assert row["model.optimizer"] == "torch.optim.AdamW"


def test_a_strategy_with_options_keeps_its_name(
    tmp_path: Path, main: Callable[..., int], capfd: pytest.CaptureFixture
) -> None:
    class_path = "lightning_mgpu.strategies.ManualAllreduceStrategy"
    strategy = {"class_path": class_path, "init_args": {"replicas": 4}}
    make_run(tmp_path / "a", SGD, strategy="ddp")
    make_run(tmp_path / "b", SGD, strategy="manual_allreduce")
    make_run(tmp_path / "c", SGD, strategy=strategy)
    assert main("runs", str(tmp_path), "--csv") == 0
    rows = [*csv.DictReader(capfd.readouterr().out.splitlines())]
    assert [row["trainer.strategy"] for row in rows] == ["ddp", *2 * ["manual_allreduce"]]
    assert [row["trainer.strategy.replicas"] for row in rows] == ["", "", "4"]


def test_where_there_is_no_run(main: Callable[..., int], capfd: pytest.CaptureFixture) -> None:
    assert main("runs", "nowhere") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: nowhere: ")


OPTIMIZERS = [
    {"o": "SGD", "o.lr": 0.1, "o.nesterov": False},
    {"o": "AdamW", "o.lr": 0.1, "o.eps": 1},
]
DIFFERENCES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "values": ([{"a": 1, "b": 2, "run_dir": "x"}, {"a": 2, "b": 2, "run_dir": "y"}], ["a"]),
    "text and number": ([{"a": 1}, {"a": "1"}], []),
    "only one has it": ([{"callbacks.0": "EMA", "callbacks.0.decay": 0.9}, {}], ["callbacks.0"]),
    "arguments of other classes": (OPTIMIZERS, ["o"]),
    "beside a third that has it": ([*OPTIMIZERS, {**OPTIMIZERS[1], "o.lr": 1}], ["o", "o.lr"]),
    "of one class": ([*OPTIMIZERS, {"o": "SGD", "o.lr": 0.1}], ["o", "o.nesterov"]),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_settings_that_differ(case: str) -> None:
    settings, names = DIFFERENCES[case]
    assert find_differences(settings) == names


def test_json_is_strict() -> None:
    """Strict JSON has no NaN."""
    text = to_json({"a": float("nan"), "b": [float("inf"), 1.5, Path("x")], 3: (True, None)})
    assert "".join(text.split()) == '{"a":null,"b":[null,1.5,"x"],"3":[true,null]}'
