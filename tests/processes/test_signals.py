"""SIGTERM ends all processes after their step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

OWN = """
import os, time
from tests.strategies.conftest import Net, fit

class Steps(Net):
    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, 3):
            line = f"in step: {self.global_rank} {os.getpid()}\\n"
            os.write(1, line.encode())  # at once, or it could be within another process's line
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    fit(Steps, devices=2, strategy="manual_allreduce", max_epochs=10_000)
"""
SECONDS = 30  # two on an idle machine, which Python needs to end; `timeout` is five minutes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], pytest.param([0, 1], marks=pytest.mark.weekly)])
def test_sigterm_ends_all_after_the_step(ranks: list[int], command: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    process = command.start(launcher=("own.py",))
    lines = (line.split() for line in process.stdout if line.startswith("in step: "))
    ids = dict([next(lines)[2:], next(lines)[2:]])
    start = time.monotonic()
    for each in ranks:
        os.kill(int(ids[str(each)]), signal.SIGTERM)
    status, _, err = command.finish(process, timeout=60)
    assert time.monotonic() - start < SECONDS, err
    if ranks == [1]:
        assert status > 0 and "ProcessEnded: process 1 has ended: see any message above" in err
    else:
        assert status == 0, err
