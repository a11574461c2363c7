"""A process that was started ends with the one that started it, whatever it does."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning_mgpu.processes import run_in_group

from lightning_mgpu import processes


def test_ctrl_c_ends_a_process_that_does_not_stop_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.2)
    presses_ctrl_c = f"trap '' INT; echo $$ > {tmp_path}/pid; sleep 0.5; kill -INT $PPID; exec sleep 60"
    with pytest.raises(KeyboardInterrupt):
        run_in_group(["sh", "-c", presses_ctrl_c])
    with pytest.raises(ProcessLookupError):
        os.killpg(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_when_the_process_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen, *args: Any) -> int:
        wait(process, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_group(["true"])
