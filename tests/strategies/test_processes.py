"""Several processes: their messages and faults, and the same bits on 1 x 4, 2 x 2 and 4 x 1."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_runs import IS_SIMULATED

from lightning_mgpu.processes import process_group

FILES = Path(__file__).parent
RUNS = FILES / "runs_over_processes.py"
pytestmark = pytest.mark.skipif(IS_SIMULATED, reason="processes start with devices of their own")


def start(*args: object, **variables: object) -> subprocess.Popen:
    """A Python process that tells all it says."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, "-W", "ignore", *map(str, args)]
    return process_group(
        command,
        env={**environment, "OMP_NUM_THREADS": "1", "PL_DISABLE_TIPS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_messages_and_faults() -> None:
    port = free_port()
    with ExitStack() as stack:
        started = [
            stack.enter_context(start(FILES / "messages.py", rank, 3, port)) for rank in range(3)
        ]
        texts = [process.communicate(timeout=200)[0] for process in started]
    assert [text.splitlines()[-1:] for text in texts] == [["done"]] * 3, "\n".join(texts)
    assert [process.returncode for process in started] == [0, -9, 0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the fingerprints of runs in one process, and a checkpoint of one."""
    directory = tmp_path_factory.mktemp("runs")
    train_on(1, directory)
    return directory


def train_on(num_processes: int, directory: Path, gradients: str = "") -> dict[str, str]:
    """The fingerprints of all runs, by name."""
    with start(RUNS, num_processes, directory, GRADIENTS=gradients) as process:
        text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    return dict(json.loads((directory / f"{num_processes}.json").read_text()))


@pytest.mark.parametrize(
    ("num_processes", "gradients"),
    [
        (2, "by owner"),
        pytest.param(2, "by all", marks=pytest.mark.slow),
        pytest.param(4, "by owner", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_on_any_number_of_processes(
    num_processes: int, gradients: str, directory: Path
) -> None:
    expected = json.loads((directory / "1.json").read_text())
    assert len({*expected.values()}) == len(expected), "every run has another result"
    assert train_on(num_processes, directory, gradients) == expected


FAULTS = {
    "raises": "process 1 has ended with LookupError: in sample 7",
    "has no seed": "process 1 differs from process 0 in its weights, in validation_step at step 0",
    "reads other batches": "process 1 differs from process 0 in its batch, in training",
    "reads another batch once": "process 1 differs from process 0 in its batch, in training_step",
    "edits weights at last": "differs from process 0 in its weights, in the end of training",
    "fills a buffer": "process 1 differs from process 0 in its number of tensors, in training_step",
    "draws in the backward pass": "The backward pass draws random numbers",
    "is killed": "process 1 has ended, for which process 0 waits at 'training_step at step 1'",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_process_ends_all(fault: str, tmp_path: Path) -> None:
    """Each with one line, and nothing stays behind: the output ends with the last process."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with ExitStack() as stack:
        started = [
            stack.enter_context(start(RUNS, 2, tmp_path, fault, LOCAL_RANK=rank, **variables))
            for rank in range(2)
        ]
        first, second = (process.communicate(timeout=120)[0] for process in started)
    assert FAULTS[fault] in first.splitlines()[-1], first
    if fault == "raises":
        assert "LookupError: in sample 7" in second and "raised in replica 2" in second
    assert all(process.returncode for process in started)
