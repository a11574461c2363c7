"""scripts/accuracy_against_bytes.py reuses finished runs, and continues after a kill."""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tests.conftest import REPOSITORY

TABLE = "| 0 | 2.0 | 0.5 | 1 % | 30.0 | 29.0 | 1.0 |\n| 1 | 4.0 | 0.5 | 1 % | 50.0 | 49.0 | |\n"
ROW = "twice=--trainer.strategy=exchange_diloco --trainer.strategy.options='{a: 1}'"


def test_runs_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    script: Any = pytest.importorskip("accuracy_against_bytes")
    lines = []

    def run_network(line):
        run = Path(line[-1].removeprefix("--run_dir="))
        run.mkdir()
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt
        names = "seconds,sent_mb,val_acc,test_acc,step"
        rows = f"{names}\n5,0.5,0.2,,47\n,,,,\n10,1,0.4,,95\n,,,0.3,96\n"
        (run / "metrics.csv").write_text(rows)
        Path(line[0].removeprefix("--csv=")).touch()
        return TABLE

    monkeypatch.setattr(script, "run_network", run_network)
    monkeypatch.setattr(script, "find_version", lambda: "1a2b3c")
    more = ["--rows", "top_k", ROW, "--seeds", "3", "4", "--speedup=2", f"--out={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["script", "--machines=3", "--links=1/1/9,100", *more])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    script.main()
    script.main()
    assert len(lines) == 5 and lines[2] == lines[3] != lines[4]
    assert lines[1][1:5] == ["--machines=3", "--delay_ms=1,1,9", "--mbit=100", "--speedup=2"]
    assert lines[1][-3] == "--trainer.strategy=exchange_diloco"
    assert lines[1][-2] == "--trainer.strategy.options={a: 1}"
    rows = [*csv.DictReader((tmp_path / "out" / "runs.csv").open())]
    found = [
        (row["label"], row["seed"], row["mb"], row["seconds"], row["ms_per_step"]) for row in rows
    ]
    assert found == [
        (label, seed, "1.0", "5.0", "40.0") for seed in "34" for label in ("top_k", "twice")
    ]
    assert (tmp_path / "out" / "accuracy.png").exists()
    out = capsys.readouterr().out
    assert "| twice | 1/1/9,100,3 | 1.00 | 40 | 5 | 0.300, 0.300 |" in out
    written = ", ".join(
        f"{tmp_path}/out/{each}" for each in ("accuracy.png", "curves.csv", "runs.csv")
    )
    assert out.endswith(f"written: {written}\n")
    points = [[*row.values()] for row in csv.DictReader((tmp_path / "out" / "curves.csv").open())]
    assert points[:2] == [
        ["top_k", "1/1/9,100,3", "3", "48", "2.5", "0.5", "0.2"],
        ["top_k", "1/1/9,100,3", "3", "96", "5.0", "1.0", "0.4"],
    ]
    assert len(points) == 8


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--output.test=false", "--output.test=false: the test accuracy is needed"),
        ("--trainer.limit_train_batches=20", "=20: fewer batches than --trainer.val_check_interv"),
        ("--trainer.limit_val_batches=0", "--trainer.limit_val_batches=0: its values are needed"),
        ("--trainer.logger=false", "--trainer.logger=False: its values are needed"),
        ("--trainer.max_epoch=1", "did you mean --trainer.max_epochs?"),
    ],
)
def test_what_it_cannot_use_is_refused_before_it_trains(
    option, hint, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    script = pytest.importorskip("accuracy_against_bytes")
    monkeypatch.setattr(script, "run_network", lambda line: pytest.fail("it trains"))
    monkeypatch.setattr(sys, "argv", ["script", "--rows=ddp", f"--out={tmp_path}/out", option])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("link", ["20,100", "1/1/40,400/400/50,3"])
def test_no_text_of_the_picture_is_cut(link, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    script = pytest.importorskip("accuracy_against_bytes")
    run = {"label": "ddp", "link": link, "seed": 0, "speedup": 4.0, "cores_are_short": True}
    figure = script.draw([{**run, "curve": np.ones((3, 4))}])
    FigureCanvasAgg(figure).draw()  # lays it out
    for axes in figure.axes:
        for text in (axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title):
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width, text


def test_an_edited_function_is_another_version(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    script: Any = pytest.importorskip("accuracy_against_bytes")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("lr = 1")
    before = script.find_version()
    assert script.find_version() == before
    (tmp_path / "mine.py").write_text("lr = 2")
    assert script.find_version() != before
