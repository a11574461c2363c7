"""`runs`: one table of the runs under a directory; broken ones are named."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

METRICS = "epoch,epoch_seconds,train_loss,val_acc,val_loss\n0,,,0.5,2.0\n0,3.0,2.1,,\n1,,,0.75,\n"


def make_run(run_dir: Path, optimizer: str, begin: int, **end: Any) -> Path:
    run_dir.mkdir(parents=True)
    init = {"optimizer": {"class_path": optimizer, "init_args": {"lr": 0.1}}}
    config = {"model": {"class_path": "a.Net", "init_args": init}, "run_dir": run_dir.name}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "run.json").write_text(json.dumps({"begin": str(begin), "end": end or None}))
    return run_dir


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs in every state: finished, killed, three with a broken file."""
    runs = tmp_path / "runs"
    (make_run(runs / "killed", "torch.optim.SGD", 2) / "metrics.csv").write_text(METRICS)
    metrics = {"val_acc": 0.25, "test_acc": 0.123456, "seconds_per_epoch": 2.5}
    end = {"state": "finished", "fingerprint": "0955842d504b", "metrics": metrics}
    finished = make_run(runs / "sweep" / "trial_000", "torch.optim.AdamW", 1, **end)
    (finished / "wandb").mkdir()
    (finished / "wandb" / "config.yaml").write_text("of: W&B\n")
    for number, content in enumerate((b"", b"trainer: [1", b"\xff\xfe")):
        broken = make_run(runs / f"broken_{number}", "torch.optim.SGD", 3)
        (broken / "config.yaml").write_bytes(content)
    (make_run(runs / "no_metrics", "torch.optim.SGD", 3) / "metrics.csv").write_bytes(b"a\xff\n")
    return runs


def test_the_table(runs: Path, main: Callable[..., int], capfd: pytest.CaptureFixture) -> None:
    """Settings with several values, metrics, state; the newest run is last."""
    assert main("runs") == 0
    out, err = capfd.readouterr()
    header, *rows = out.splitlines()
    last = ["val_acc", "val_loss", "test_acc", "seconds_per_epoch", "fingerprint", "state"]
    assert header.split() == ["run", "model.optimizer", *last]
    assert [row.split() for row in rows] == [
        ["sweep/trial_000", "AdamW", "0.25", "0.1235", "2.5", "0955842d504b", "finished"],
        ["killed", "SGD", "0.75", "2", "3", "unfinished"],
    ]
    assert rows[0].index("AdamW") == rows[1].index("SGD") == header.index("model.optimizer")
    broken = [*(f"broken_{i}/config.yaml" for i in range(3)), "no_metrics/metrics.csv"]
    assert err.count("\n") == 4 and all(name in err for name in broken)
    # with every digit and the whole class
    assert main("runs", "--csv") == 0
    row, _ = csv.DictReader(capfd.readouterr().out.splitlines())
    assert row["model.optimizer"] == "torch.optim.AdamW" and row["test_acc"] == "0.123456"
    assert main("runs", str(runs / "sweep"), "--csv") == 0
    (row,) = csv.DictReader(capfd.readouterr().out.splitlines())
    assert row["run"] == "trial_000"
    assert main("runs", "one", "two") == 2
