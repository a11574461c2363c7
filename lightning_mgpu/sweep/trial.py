"""One trial: a `fit` in a process of its own. It does not look at the test set, and it draws no pictures."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.callbacks import ConfusionMatrix, LearningCurve, PredictionGrid
from lightning_mgpu.errors import UsageError
from lightning_mgpu.processes import STOP_SECONDS, process_group

POLL_SECONDS = 1.0  # from one look at the metrics to the next


class Trial(Callback):
    """Makes a run a trial: nothing is tested, no picture is drawn.

    Raises:
        UsageError: If the run would validate on the test set, so that the sweep would tune on it.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(trainer.datamodule, "validates_on_test_set", False):  # type: ignore[attr-defined]
            raise UsageError("a sweep that validates on the test set would tune on it: give --data.val_size=5000")
        pictures = (LearningCurve, PredictionGrid, ConfusionMatrix)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, pictures)]  # type: ignore[attr-defined]
        trainer.limit_test_batches = 0


def run(arguments: list[str], log: IO[str], is_hopeless: Callable[[], bool]) -> int:
    """Run `fit` with its output in `log`; returns its exit status.

    About once a second `is_hopeless` is asked. A hopeless trial is stopped, and so is one that Ctrl-C interrupts here.
    """
    command = [sys.executable, "-m", "lightning_mgpu", "fit", *arguments]
    # the process inherits the lock on its log, and keeps it if this one is killed
    with process_group(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None and not is_hopeless():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)  # `fit` closes its records
                    process.wait(STOP_SECONDS)
    return int(process.returncode)


def metric_values(run_dir: Path, metric: str) -> list[float]:
    """What a run has logged of a metric so far, in order."""
    with contextlib.suppress(FileNotFoundError), (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
    return []


def why_it_failed(output: str, status: int) -> str:
    """One line: the command line's `error: `, else the last line, where a traceback names its exception."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"ended with status {status}"]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return told[-1] if told else lines[-1]
