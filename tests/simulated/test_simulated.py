"""Training on devices that differ is that of one device, and everything is where it is used."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.weekly
@pytest.mark.timeout(520)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
def test_on_simulated_devices():
    """In a process of its own: torch takes one such backend, and keeps it."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "-W", "ignore"]
    line = [sys.executable, "-m", "pytest", *options, "--tb=short", "tests/strategies/test_dp.py"]
    done = subprocess.run(line, cwd=TESTS.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
