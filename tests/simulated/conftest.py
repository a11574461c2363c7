import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run_on_simulated_devices() -> Callable[..., None]:
    """Run files of tests/strategies in a process of its own: torch takes one such backend, and keeps it."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the simulated devices")

    def run(*names: str) -> None:
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.simulated.devices", "--tb=short", "-W", "ignore"]
        line = [sys.executable, "-m", "pytest", *options, *(str(TESTS / "strategies" / name) for name in names)]
        done = subprocess.run(line, cwd=TESTS.parent, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr

    return run
