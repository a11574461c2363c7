"""How a trial went, in one line."""

import signal
from pathlib import Path

import pytest

from lightning_mgpu.sweep.trial import divergence, read_metrics, why_it_ended

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


def test_metrics_and_where_they_diverge(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_acc\n0,1,,0.5\n0,1,2.5,\n1,2,,0.25\n1,2,nan,\n")
    metrics = read_metrics(tmp_path)
    assert metrics["val_acc"] == [0.5, 0.25] and set(metrics) == {"train_loss", "val_acc"}
    assert divergence(metrics) == "diverged: train_loss is nan in epoch 2"
    assert divergence({"val_acc": [0.5, 0.25]}) is None
