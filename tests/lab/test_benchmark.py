"""`python -m lightning_mgpu benchmark`: its rows, its rounds, its table, and its mistakes."""

import os
import re
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from lightning_mgpu.lab import benchmark

BORING = "lightning.pytorch.demos.boring_classes.BoringDataModule"


@pytest.fixture
def fits(main, monkeypatch):
    """The command lines of the fits, of which none is started. `dp` fails."""
    lines = []

    def ms_per_step(line):
        lines.append(line)
        if "--trainer.strategy=dp" in line:
            raise ChildProcessError("no dp")
        if len(lines) == 9:
            raise KeyboardInterrupt
        return 100.0 * len(lines)

    monkeypatch.setattr(benchmark, "ms_per_step", ms_per_step)
    return lines


def test_fits_are_measured_and_a_failure_is_named(main, tmp_path, monkeypatch, capsys):
    def run_here(command, log):
        with redirect_stderr(log):
            return main(*command[3:])

    monkeypatch.setattr(benchmark, "run_in_group", run_here)
    rows = ["ok=--trainer.strategy=auto", "bad=--trainer.strategy=dp --trainer.sync_batchnorm=true"]
    shared = ["--data.batch_size=16", "--num_steps=3", "--repeats=1", "--devices=1"]
    assert main("benchmark", *shared, "--trainer.accelerator=cpu", *rows) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n\| ok \| [\d.]+ \([\d.]+ to [\d.]+\) \| 1.00 \|\n", out)
    assert re.search(r"\n\| bad \| failed: .*sync_batchnorm.* \|  \|\n", out)
    assert not (tmp_path / "runs").exists()


def test_rounds(main, fits, capsys):
    """Each begins with another row; what failed is not repeated; Ctrl-C keeps what is done."""
    assert main("benchmark", "--csv=times.csv") == 130
    names = [re.findall("--trainer.strategy=(\\w+)", " ".join(line))[0] for line in fits]
    rounds = ["auto ddp dp manual_allreduce", "ddp manual_allreduce auto", "manual_allreduce auto"]
    assert names == " ".join(rounds).split()
    out = capsys.readouterr().out
    assert "| ddp | 350.0 (200.0 to 500.0) | 1.36 |" in out, "ratios 200 / 100 and 500 / 700"
    assert "| dp | failed: no dp |  |" in out
    assert Path("times.csv").read_text().splitlines()[-1] == "3,manual_allreduce,800.0"


def test_options_of_the_fits(main, fits):
    """Images are random if no data are chosen; a row's options win over shared ones."""
    rows = [
        "a=--data.batch_size=64",
        f"b=--data={BORING}",
        "c=--data.source=auto",
        "d=--model.lr=9",
    ]
    shared = ["--model.lr=0.1", "--num_steps", "5", "--model", "LeNet", "--repeats=1"]
    assert main("benchmark", *shared, *rows) == 0
    assert [line.count("--data.source=synthetic") for line in fits] == [1, 0, 0, 1]
    common = "--trainer.limit_train_batches=5 --model.lr=0.1 --model LeNet --trainer.devices=2 "
    assert all(common in " ".join(line) for line in fits)
    assert f"{common}--model.lr=9 " in " ".join(fits[3])


@pytest.mark.parametrize(("most", "threads", "note"), [(2, 4, "| torch"), (16, 1, "16 processes")])
def test_all_processes_have_as_many_threads(most, threads, note, main, fits, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    assert main("benchmark", "--devices=1", "a=", f"b=--trainer.devices={most}", "--repeats=1") == 0
    out = capsys.readouterr().out
    assert f"OMP_NUM_THREADS={threads} |" in out and out.startswith(note)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--modle=A", "unrecognized arguments: --modle=A"),
        ("a= a=--model=LeNet", "two ROWs have the same label"),
        ("--trainer.strategy=dp", "use it in a ROW"),
        ("a=--trainer.strategy=dp", "no row could be measured"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, message, main, fits, capsys):
    assert main("benchmark", *words.split()) == 2
    err = capsys.readouterr().err
    assert re.search(f"^error: .*{re.escape(message)}", err, re.MULTILINE), err
    assert len(fits) == ("no row" in message)
