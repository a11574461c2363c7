"""Training on devices that differ is that of one device, and everything is where it is used."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DP = pytest.param(HERE.parent / "strategies" / "test_dp.py", marks=pytest.mark.weekly)


@pytest.mark.slow
@pytest.mark.timeout(520)
@pytest.mark.parametrize("path", [HERE, DP])
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
def test_on_simulated_devices(path):
    """In a process of its own: torch takes one such backend, and keeps it."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "-W", "ignore"]
    line = [sys.executable, "-m", "pytest", *options, "--tb=short", str(path)]
    done = subprocess.run(line, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
