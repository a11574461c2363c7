"""`runs`: one table of the runs under a directory."""

import csv
import json

import pytest

METRICS = """epoch,epoch_seconds,sent_mb,train_loss,val_acc,val_loss
0,,,,0.5,2.0
0,3.0,1.5,2.1,,
1,,2.5,,0.75,
"""


def make_run(run_dir, optimizer, begin, **end):
    run_dir.mkdir(parents=True)
    options = {"model": "a.Net", "model.optimizer": optimizer, "run_dir": run_dir.name}
    content = {"begin": str(begin), "options": options, "end": end or None}
    (run_dir / "run.json").write_text(json.dumps(content))
    return run_dir


@pytest.fixture
def runs(tmp_path):
    runs = tmp_path / "runs"
    (make_run(runs / "killed", "torch.optim.SGD", 2) / "metrics.csv").write_text(METRICS)
    metrics = {"val_acc": 0.25, "test_acc": 0.1234567, "seconds_per_epoch": 2.5}
    end = {"state": "finished", "fingerprint": "0955842d504b", "metrics": metrics}
    make_run(runs / "sweep" / "trial_000", "torch.optim.AdamW", 1, **end)
    return runs


def test_the_table(runs, main, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    assert main("runs") == 0
    header, *rows = capfd.readouterr().out.splitlines()
    metrics = ["val_acc", "val_loss", "sent_mb", "seconds_per_epoch", "fingerprint", "state"]
    assert header.split() == ["run", *metrics, "test_acc", "model.optimizer"]
    assert [row.split() for row in rows] == [
        ["sweep/trial_000", "0.25", "2.5", "0955842d504b", "finished", "0.12346", "AdamW"],
        ["killed", "0.75", "2", "2.5", "3", "unfinished", "SGD"],
    ]
    assert rows[0].index("AdamW") == rows[1].index("SGD") == header.index("model.optimizer")
    monkeypatch.setenv("COLUMNS", "60")
    assert main("runs") == 0
    table = capfd.readouterr().out.splitlines()
    assert table[0].split() == ["run", "val_acc", "val_loss", "sent_mb", "fingerprint"]
    assert max(map(len, table)) <= 60
    # with every digit and the whole class
    assert main("runs", "--csv") == 0
    row, _ = csv.DictReader(capfd.readouterr().out.splitlines())
    assert row["model.optimizer"] == "torch.optim.AdamW" and row["test_acc"] == "0.1234567"
    assert main("runs", str(runs / "sweep"), "--csv") == 0
    (row,) = csv.DictReader(capfd.readouterr().out.splitlines())
    assert row["run"] == "trial_000"
    assert main("runs", "one", "two") == 2


def test_a_strangers_run_does_not_control_the_terminal(runs, main, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    run = make_run(runs / "a\x1bb", "\x1b]0;title\x07", 3, state="\x1b[2J")
    for args in ((), ("--csv",)):
        assert main("runs", *args) == 0
        out = capfd.readouterr().out
        assert "a?b" in out and "?[2J" in out and "?]0;title?" in out
        assert all(each.isprintable() for each in out.replace("\n", "")), run


def test_chosen_columns_and_other_commands(runs, main, capfd):
    end = {"state": "finished", "metrics": {"test_loss": 1.0, "val_acc": 0.5}}
    content = {"command": "python -m lightning_mgpu test", "options": {"seed": 3}, "end": end}
    (runs / "tested").mkdir()
    (runs / "tested" / "run.json").write_text(json.dumps(content))

    def table(*args):
        assert main("runs", *args) == 0
        return [line.split() for line in capfd.readouterr().out.splitlines()]

    header, *rows = table()
    assert not {"seed", "test_loss", "model"} & {*header} and rows[0][:2] == ["tested", "0.5"]
    assert table("--columns=model.init_args.optimizer") == table("--columns=model.optimizer")
    names = "--columns=val_acc,model"
    assert table(names, "--sort=val_acc") == [
        ["run", "val_acc", "model"],
        *(["sweep/trial_000", "0.25", "Net"], ["tested", "0.5"], ["killed", "0.75", "Net"]),
    ]
    assert [row[0] for row in table(names, "--sort=model")][1] == "tested"
    assert main("runs", "--sort=val_ac") == 2
    assert "no run has a column val_ac: `runs --csv` lists" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["[1]", '{"end": "x"}', '{"end": {"metrics": [3]}}', "{", "\xff"])
def test_a_record_that_is_not_one(text, runs, main, capfd):
    (runs / "killed" / "run.json").write_text(text, encoding="latin-1")
    assert main("runs", str(runs), "--csv") == 0
    rows = csv.DictReader(capfd.readouterr().out.splitlines())
    assert {row["run"]: row["state"] for row in rows}["killed"] == "unfinished"
