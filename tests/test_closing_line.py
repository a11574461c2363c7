"""How `fit` ends: with the book's line, also where there is no test, no checkpoint, or no epoch."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.cli import closing_line

CPU = "--trainer.accelerator=cpu"


def test_fit_ends_well_without_a_test(main: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    once = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2")
    data = (f"--data.root={root}", "--data.val_size=101", CPU)
    assert main("fit", *data, *once, "--trainer.limit_test_batches=0") == 0
    assert re.fullmatch(r"\d+\.\d sec/epoch on \[device.*\]", capfd.readouterr().out.splitlines()[-1])


def test_a_run_without_checkpoints(main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run = (f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.max_epochs=1", "--run_dir=run")
    assert main("fit", *run, "--trainer.enable_checkpointing=false") == 2
    fix = re.search(r"(--checkpoint\S+) (--checkpoint\S+) saves no checkpoint", capfd.readouterr().err)
    assert fix and main("fit", *run, *fix.groups()) == 0
    assert "test acc" in capfd.readouterr().out and not list(tmp_path.rglob("*.ckpt"))


def test_the_time_is_that_of_all_epochs(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first one was the best: the test loads its checkpoint, callbacks included."""
    monkeypatch.setattr("lightning_mgpu.cli.closing_line", lambda metrics, seconds, devices: f"{seconds:.6f}")
    first = ("--checkpoint.monitor=train_loss", "--checkpoint.mode=max")
    run = (f"--data.root={root}", "--data.val_size=101", CPU, "--trainer.max_epochs=2", "--run_dir=run")
    assert main("fit", *run, *first) == 0
    assert [path.name[:7] for path in (tmp_path / "run" / "checkpoints").glob("epoch*")] == ["epoch=0"]
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    seconds = [float(row["epoch_seconds"]) for row in rows if row["epoch_seconds"]]
    assert float(capfd.readouterr().out.splitlines()[-1]) == pytest.approx(sum(seconds) / 2, rel=1e-3)


@pytest.mark.slow
def test_training_for_no_epoch_has_no_time(main: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    """Nor has it that of the run its checkpoint is of."""
    run = (f"--data.root={root}", "--data.val_size=101", CPU)
    assert main("fit", *run, "--trainer.max_epochs=1", "--run_dir=run") == 0
    for begin in ("--trainer.max_epochs=0", "--trainer.max_epochs=1 --ckpt_path=run/checkpoints/last.ckpt"):
        capfd.readouterr()
        assert main("fit", *run, *begin.split()) == 0
        assert ", no epoch trained on [device(" in capfd.readouterr().out.splitlines()[-1]


def test_closing_line() -> None:
    line = closing_line({"test_acc": 0.8312, "test_loss": 0.5}, 3.14, "[device(type='cpu')]")
    assert line == "test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]"
    assert closing_line({"my_metric": 2.0}, 1.0, "x") == "my metric: 2.00, 1.0 sec/epoch on x"


@pytest.mark.slow
def test_a_best_checkpoint_that_is_gone_is_not_tested(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """As after a kill between a new best checkpoint, which replaces the old one, and the `last.ckpt` that names it."""
    brief = (f"--data.root={root}", "--data.val_size=101", "--trainer.accelerator=cpu", "--trainer.max_epochs=1")
    assert main("fit", *brief, "--run_dir=run") == 0
    (best,) = (tmp_path / "run" / "checkpoints").glob("epoch=*.ckpt")
    best.unlink()
    assert main("fit", "--resume=run") == 0
    assert "test acc: " in capfd.readouterr().out.splitlines()[-1]
    assert f"{best.name}, the best checkpoint, is gone" in "".join(str(w.message) for w in recwarn)
