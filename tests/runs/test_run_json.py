"""`run.json`: the options of a run, where it ran, and how it ended, in every case."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.runs import run_json
from lightning_mgpu.runs.record import fingerprint
from lightning_mgpu.runs.run_json import find_commit, find_state
from tests.runs.conftest import last, metrics

ONE = ("--trainer.devices=1", "--run_dir=run")


def read(run_dir: Path) -> dict[str, Any]:
    """The file, which has to be strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads((run_dir / "run.json").read_text(), parse_constant=refuse)


def test_a_finished_run(run: Path) -> None:
    record = read(run)
    assert record["command"].startswith("python -m lightning_mgpu fit --model=own_run.Net ")
    assert record["options"]["trainer.max_epochs"] == "2"
    assert record["git"] is None and record["seed"] == 42 and record["num_resumes"] == 0
    assert record["versions"]["torch"] == torch.__version__
    assert record["strategy"] == "SingleDeviceStrategy"
    assert record["devices"] == "cpu" and record["gpus"] == []
    assert record["num_parameters"] == 784 * 16 + 16 + 16 * 10 + 10
    end = record["end"]
    assert end["state"] == "finished" == find_state(run) and end["why"] is None
    assert record["begin"] < end["time"] and end["epochs"] == 2
    assert end["fingerprint"] == fingerprint(last(run)["state_dict"].values())
    rows = [row for row in metrics(run) if row["val_acc"]]
    best = max(rows, key=lambda row: float(row["val_acc"]))
    assert end["best"] == {
        "epoch": int(best["epoch"]) + 1,
        "monitor": "val_acc",
        "value": float(best["val_acc"]),
    }
    assert end["validation"]["val_loss"] == float(best["val_loss"])
    (tested,) = (row for row in metrics(run) if row["test_acc"])
    assert end["test"]["test_acc"] == float(tested["test_acc"])
    assert 0 < end["seconds_per_epoch"] < 60


def test_an_interrupted_and_resumed_run(fit: Callable[..., int], own: Path) -> None:
    """Its best epoch is the first one, whose metrics it has when it ends after the second one."""
    falls = "--model=own_run.Falls", "--model.name=val_f1", "--checkpoint.monitor=val_f1"
    assert fit(*ONE, *falls, stop="1,0") == 1
    end = read(own / "run")["end"]
    assert end["state"] == "interrupted" == find_state(own / "run") and end["epochs"] == 1
    best = {"epoch": 1, "monitor": "val_f1", "value": 1.0}
    assert end["best"] == best and "fingerprint" not in end
    assert fit("--resume=run", "--trainer.max_epochs=2") == 0
    record = read(own / "run")
    assert record["command"].endswith(" fit --resume=run --trainer.max_epochs=2")
    assert record["num_resumes"] == 1 and record["end"]["state"] == "finished"
    assert record["end"]["epochs"] == 2 and record["end"]["best"] == best
    assert record["end"]["validation"]["val_f1"] == 1.0


def test_a_failed_run(fit: Callable[..., int], own: Path) -> None:
    (own / "failing.py").write_text(
        "from own_run import Net\n\n\nclass Failing(Net):\n"
        "    def on_train_epoch_end(self):\n        raise RuntimeError('no\\nluck')\n"
    )
    with pytest.raises(RuntimeError):
        fit(*ONE, "--model=failing.Failing")
    end = read(own / "run")["end"]
    assert (end["state"], end["why"]) == ("failed", "RuntimeError: no\nluck")
    assert end["epochs"] == 0 and end["seconds_per_epoch"] is None and "fingerprint" not in end


def test_a_run_that_is_ended_in_its_test(fit: Callable[..., int], own: Path) -> None:
    """SIGTERM ends every stage with a status that is not 0."""
    (own / "ending.py").write_text(
        "import os\nimport signal\n\nfrom own_run import Net\n\n\nclass Ending(Net):\n"
        "    def on_test_batch_start(self, *args):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert fit(*ONE, "--model=ending.Ending", "--trainer.max_epochs=1") == 1
    end = read(own / "run")["end"]
    assert (end["state"], end["why"]) == ("interrupted", "Ctrl-C or SIGTERM")


def test_code_that_ends_the_process(fit: Callable[..., int], own: Path) -> None:
    (own / "leaving.py").write_text(
        "import sys\n\nfrom own_run import Net\n\n\nclass Leaving(Net):\n"
        "    def on_train_epoch_end(self):\n        sys.exit(3)\n"
    )
    assert fit(*ONE, "--model=leaving.Leaving") == 3
    end = read(own / "run")["end"]
    assert (end["state"], end["why"]) == ("interrupted", "sys.exit(3)")


def test_a_run_that_stops_early_without_loggers(fit: Callable[..., int], own: Path) -> None:
    stop = "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_mine"
    assert fit(*ONE, *stop, "--trainer.callbacks.patience=1", "--trainer.logger=false") == 0
    end = read(own / "run")["end"]
    assert (end["state"], end["epochs"]) == ("stopped", 2)
    assert end["why"] == "val_mine has not improved for 1 epoch"
    assert end["best"]["monitor"] == "val_acc" and end["test"]["test_acc"] >= 0
    assert end["validation"] == {} and end["seconds_per_epoch"] is None  # without metrics.csv


def test_fast_dev_run_leaves_none(
    fit: Callable[..., int], own: Path, capfd: pytest.CaptureFixture
) -> None:
    assert fit(*ONE, "--trainer.fast_dev_run=true") == 0
    assert "testing the last epoch: no checkpoints are saved" in capfd.readouterr().out
    assert not [*own.rglob("run.json")]


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_commit() is None  # outside of git

    def git(*args: str) -> str:
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        return subprocess.run(
            ["git", *who, *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "notes.txt").write_text("not tracked")
    assert find_commit() == {"commit": git("rev-parse", "HEAD"), "is_dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert find_commit() == {"commit": git("rev-parse", "HEAD"), "is_dirty": True}


def test_git_ends_no_run_and_delays_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(run_json, "GIT_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    started = time.monotonic()
    assert find_commit() is None
    assert time.monotonic() - started < 30
    monkeypatch.setenv("PATH", "")
    assert find_commit() is None  # there is no git
