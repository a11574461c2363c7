"""How a trial went, in one line."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.sweep.trial import divergence, read_metrics, run_trial, why_it_ended

TRACEBACK = "epoch 1/2\nTraceback (most recent call last):\n  File ...\n"


@pytest.mark.parametrize(
    ("output", "status", "line"),
    [
        ("x\nerror: --a=b: expected a number (--traceback shows where)\n", 2, "--a=b: expected a number"),
        (f"{TRACEBACK}RuntimeError: a | b\n[W socket] gone\n", 1, "RuntimeError: a | b"),
        (f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory.\n", 1, "torch.OutOfMemoryError: CUDA out of memory."),
        ("epoch 1/2\n", -signal.SIGKILL, "ended by SIGKILL (out of memory?)"),
        ("epoch 1/2\n", -signal.SIGSEGV, "ended by SIGSEGV"),
        ("", 3, "ended with status 3"),
    ],
)
def test_why_it_ended(output: str, status: int, line: str) -> None:
    assert why_it_ended(output, status) == line


@pytest.mark.parametrize("end", [None, KeyboardInterrupt])
def test_no_secret_stays_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    """Tracebacks show them."""

    def run(command: Any, output: Any) -> int:
        output.write("Traceback\nOSError: https://bob:hunter2@host is away\n")
        if end:
            raise end
        return 1

    monkeypatch.setattr("lightning_mgpu.sweep.trial.run_in_group", run)
    log = tmp_path / "trial.log"
    if end:
        with pytest.raises(end):
            run_trial([], log)
    else:
        assert run_trial([], log) == "OSError: https://***@host is away"
    assert log.read_text() == "Traceback\nOSError: https://***@host is away\n"


def test_ctrl_c_before_there_is_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_trial([], tmp_path / "trial.log")


SLEEPER = """
import signal, sys
from lightning_mgpu.runs.processes import exit_on_sigterm, run_in_group
signal.signal(signal.SIGHUP, signal.{before})
exit_on_sigterm()
sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
sys.exit(run_in_group([sys.executable, "-c", sleep]))
"""


@pytest.mark.parametrize(("before", "status"), [("SIG_DFL", 128 + signal.SIGHUP), ("SIG_IGN", 128 + signal.SIGTERM)])
def test_a_closed_terminal_ends_the_trial_unless_under_nohup(before: str, status: int, command: Any) -> None:
    process = command.start(launcher=("-c", SLEEPER.format(before=before)))
    trial = int(process.stdout.readline())
    for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)[: 2 if before == "SIG_DFL" else 3]:
        process.send_signal(signum)
    code, _, err = command.finish(process, 20)
    assert code == status, err
    with pytest.raises(ProcessLookupError):
        os.kill(trial, 0)


def test_a_signal_while_the_trial_starts_ends_it(command: Any) -> None:
    """Nobody has got to know its process then."""
    start = """
import subprocess
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)
        signal.raise_signal(signal.SIGTERM)
subprocess.Popen = Popen
sleep ="""
    process = command.start(launcher=("-c", SLEEPER.format(before="SIG_DFL").replace("sleep =", start)))
    trial = int(process.stdout.readline())
    code, _, err = command.finish(process, 20)
    assert code == 128 + signal.SIGTERM, err
    with pytest.raises(ProcessLookupError):
        os.kill(trial, 0)


def test_metrics_and_where_they_diverge(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    rows = ("epoch,step,lr,test_loss,train_loss,val_acc", "0,1,,,,0.5", "0,1,,,2.5,", "0,2,,,2.0,", ",2,0.1,,,")
    (tmp_path / "metrics.csv").write_text("\n".join((*rows, "1,3,,,,0.25", "1,3,,,nan,", "2,3,,nan,,")))
    metrics = read_metrics(tmp_path)
    assert set(metrics) == {"lr", "test_loss", "train_loss", "val_acc"}
    assert metrics["val_acc"] == [(1, 0.5), (2, 0.25)] and metrics["lr"] == [(1, 0.1)]
    assert divergence(metrics) == "diverged: train_loss is nan in epoch 2"
    assert divergence({"test_loss": metrics["test_loss"]}) == "diverged: test_loss is nan"  # of no epoch
    assert divergence({"val_acc": metrics["val_acc"]}) is None
