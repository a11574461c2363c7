"""SIGTERM ends all processes after their step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

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
COMMAND_SAYS = "enough memory; go on with: "
RUNS = (
    ("script", 0, "ProcessEnded: process 1 has ended: see any message above"),
    pytest.param("command", 130, COMMAND_SAYS, marks=pytest.mark.weekly),
)
SECONDS = 30  # two on an idle machine, which Python needs to end; `timeout` is five minutes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], pytest.param([0, 1], marks=pytest.mark.weekly)])
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
