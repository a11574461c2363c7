"""SIGTERM ends all processes after their step; a job that was suspended goes on."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.conftest import (
    Net,
    assert_close,
    attempt,
    fit,
    make_strategy,
    rank,
    run_in_processes,
)

OWN = """
import os, time
from lightning_mgpu.models import LeNet
from tests.strategies.conftest import Net, fit

class Steps:
    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, 3):
            line = f"in step: {self.global_rank} {os.getpid()}\\n"
            os.write(1, line.encode())  # at once, or it could be within another process's line
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

class Small(Steps, Net):
    pass

class Large(Steps, LeNet):
    pass

if __name__ == "__main__":
    fit(Small, devices=2, strategy="manual_allreduce", max_epochs=10_000)
"""
COMMAND = (
    *("-m", "lightning_mgpu", "fit", "--model=own.Large", "--trainer.devices=2"),
    *("--trainer.strategy=manual_allreduce", "--trainer.accelerator=cpu", "--data.batch_size=20"),
    "--data.source=synthetic",
)
COMMAND_SAYS = "error: process 1 was ended by SIGTERM; go on with: python -m lightning_mgpu"
RUNS = (
    ("script", 0, "ProcessEnded: process 1 has ended: see any message above"),
    pytest.param("command", 130, COMMAND_SAYS, marks=pytest.mark.weekly),
)
SECONDS = 30  # two on an idle machine, which Python needs to end; `timeout` is five minutes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize(("name", "status", "said"), RUNS)
def test_sigterm_ends_all_after_the_step(
    name: str, status: int, said: str, ranks: list[int], command: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    process = command.start(launcher=COMMAND if name == "command" else ("own.py",))
    lines = (line.split() for line in process.stdout if line.startswith("in step: "))
    ids = dict([next(lines)[2:], next(lines)[2:]])
    start = time.monotonic()
    for each in ranks:
        os.kill(int(ids[str(each)]), signal.SIGTERM)
    found, _, err = command.finish(process, timeout=60)
    assert time.monotonic() - start < SECONDS, err
    if ranks == [1]:
        assert found > 0 and said in err
    else:
        assert found == status, err


class Suspended(Net):
    """Processes are stopped for longer than their timeout, while one waits for the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if rank() == 1 and self.global_step == 3:
            ids = " ".join(map(str, self.trainer.strategy.process_ids))  # type: ignore[attr-defined]
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {ids}; sleep 4; kill -CONT {ids}"])
            time.sleep(5.5)
        return self.loss(batch)


def fit_suspended() -> Any:
    return attempt(fit, Suspended, strategy=make_strategy(3))


def test_a_job_that_was_suspended_goes_on() -> None:
    start = time.monotonic()
    for found in run_in_processes(2, fit_suspended):
        assert_close(found, fit())
    assert time.monotonic() - start > 4
