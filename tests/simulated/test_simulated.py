"""Tests that start a Trainer in this process run once more on simulated devices.

On devices that differ, training is that of one device, everything that a step uses is on its
shard's device, and whatever else a run does works where the weights are not on the CPU.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GROUPS = {
    "steps": ["strategies/test_dp.py", "simulated/test_steps.py", "simulated/test_watch.py"],
    "parts": ["callbacks", "models", "data/test_batches.py", "allreduce", "test_book.py"],
    "commands": ["simulated/test_commands.py", "runs/test_resume.py", "runs/test_records.py"],
}


@pytest.mark.slow
@pytest.mark.timeout(520)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
@pytest.mark.parametrize("group", GROUPS)
def test_on_simulated_devices(group: str) -> None:
    """In a process of its own: torch takes one such backend, and keeps it."""
    # directories that are not needed can be deleted
    paths = [str(path) for name in GROUPS[group] if (path := TESTS / name).exists()]
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "-W", "ignore"]
    line = [sys.executable, "-m", "pytest", *options, "--tb=short", *paths]
    done = subprocess.run(line, cwd=TESTS.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
