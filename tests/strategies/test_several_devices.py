"""Tests of this folder again, on simulated devices that differ, as several GPUs do (see tests/simulated/devices.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

HERE = Path(__file__).parent
PARTS = ("placement", "loops/test_predictions.py")
FILES = ("parity", "norms", "states", "dropout", "twins", "structure", "lists", "attributes", "schedulers")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.15"), reason="tried with the headers of torch 2.15 alone")
@pytest.mark.parametrize("parts", [PARTS, [f"test_{name}.py" for name in FILES]], ids=["placement", "others"])
def test_on_simulated_devices(parts: list[str]) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "--tb=short", "-W", "ignore"]
    line = [sys.executable, "-m", "pytest", *options, *(str(HERE / part) for part in parts)]
    run = subprocess.run(line, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
