"""On devices that differ, training is that of one device, and everything a step uses is on its replica's device."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
STEPS = ["../simulated/test_steps.py", "../allreduce", "test_precision.py", "test_devices.py"]
PARITY = ["test_parity.py", "test_replicas.py", "test_norms.py", "test_random.py", "test_optimizers.py"]
PLACEMENT = ["test_attributes.py", "test_outputs.py", "test_manual.py", "test_checkpoints.py", "test_trainer.py"]
PLACEMENT += ["test_errors.py::test_a_failure_in_one_replica", "test_metrics.py::test_ways_to_log_a_metric"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
@pytest.mark.parametrize("names", [PARITY, PLACEMENT, STEPS], ids=["parity", "placement", "steps"])
def test_on_simulated_devices(names: list[str]) -> None:
    """In a process of its own: torch takes one such backend, and keeps it."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "--tb=short", "-W", "ignore"]
    line = [sys.executable, "-m", "pytest", *options, *(str(TESTS / "strategies" / name) for name in names)]
    done = subprocess.run(line, cwd=TESTS.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
