"""Tests that start a Trainer run once more on simulated devices.

On devices that differ, training is that of one device, everything that a step uses is on its
replica's device, and whatever else a run does works where the weights are not on the CPU.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GROUPS = {  # from tests/strategies: what starts a Trainer in its own process
    "parity": [
        "test_parity.py",
        "test_replicas.py",
        "test_norms.py",
        "test_random.py",
        "test_optimizers.py",
    ],
    "placement": [
        *(
            "test_attributes.py",
            "test_outputs.py",
            "test_manual.py",
            "test_checkpoints.py",
            "test_trainer.py",
        ),
        *(
            "test_errors.py::test_a_failure_in_one_replica",
            "test_metrics.py::test_ways_to_log_a_metric",
        ),
    ],
    "records": [
        "test_silent_faults.py",
        "test_backward.py",
        "test_gather.py",
        "test_calls.py::test_collectives_need_lockstep",
        "test_calls.py::test_a_loss_of_gathered_samples",
        "test_state.py::test_neurons_keep_their_state",
    ],
    "steps": [
        "../simulated/test_steps.py",
        "../simulated/test_watch.py",
        "../allreduce",
        "test_precision.py",
        "test_devices.py",
        "test_on_demand.py",
    ],
    "runs": ["../runs/test_checkpoints.py", "../runs/test_model_summary.py"],
    "resume": ["../runs/test_records.py", "../runs/test_resume.py"],
    "parts": [
        *("../callbacks", "../models", "../data/test_batches.py", "../data/test_fashion_mnist.py"),
        *("../benchmark", "../test_book.py", "../test_modes.py"),
    ],
    "tools": [
        "../simulated/test_commands.py",
        "../cli/test_mistakes.py::test_code_of_ones_own",
        "../test_adding.py",
    ],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the simulated devices")
@pytest.mark.parametrize("group", GROUPS)
def test_on_simulated_devices(group: str) -> None:
    """In a process of its own: torch takes one such backend, and keeps it."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.simulated.devices",
        "--tb=short",
        "-W",
        "ignore",
    ]
    paths = [str(TESTS / "strategies" / name) for name in GROUPS[group]]
    # directories that are not needed can be deleted
    paths = [path for path in paths if Path(path.partition("::")[0]).exists()]
    line = [sys.executable, "-m", "pytest", *options, *paths]
    done = subprocess.run(line, cwd=TESTS.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
