"""A process that ends, hangs or trains something else ends the others, within the timeout.

SIGTERM ends all processes after their step.
"""

import gc
import os
import signal
import sys
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_mgpu.allreduce import ring_allreduce
from lightning_mgpu.allreduce.plan import Execution
from tests.strategies.conftest import (
    IN_MEMORY,
    Net,
    attempt,
    fit,
    make_strategy,
    no_shared_memory,
    rank,
    run_in_processes,
)

SECONDS = 3.0
ENDED = " exited unexpectedly; see its output above"
LATE = "waited 3 s (`timeout`) for process 1. Common causes"
ELSEWHERE = "synchronization points (process 0: gradients, process 1: weights). Common causes"


class Fails(Net):
    def training_step(self, batch, batch_idx):
        fails = rank() == 1 and batch_idx == 2
        return self.fail(self.loss(batch)) if fails else self.loss(batch)

    def fail(self, loss):
        """Returns no loss."""


class Killed(Fails):
    def fail(self, loss):
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Fails):
    def fail(self, loss):
        raise KeyError("mine")


class RaisesInSetup(Net):
    def setup(self, stage):
        if rank() == 1:
            raise KeyError("mine")


class Hangs(Fails):
    def fail(self, loss):
        time.sleep(4 * SECONDS)
        return loss


class SavesAlone(Fails):
    def fail(self, loss):
        self.trainer.save_checkpoint("alone.ckpt")


ENDS = {  # what both processes end with
    "killed": (Killed, [ENDED, -signal.SIGKILL]),
    "raises": (Raises, [ENDED, "KeyError: 'mine'"]),
    "raises in setup": (RaisesInSetup, [ENDED, "KeyError: 'mine'"]),
    "hangs": (Hangs, [LATE, ENDED]),
    "one of three hangs": (Hangs, [LATE, ENDED, LATE]),
    "saves alone": (SavesAlone, [ELSEWHERE, ELSEWHERE]),
    "no loss": (Fails, [ENDED, "every shard needs a loss"]),
}


def fit_one(name, sends=False, **kwargs):
    with no_shared_memory() if sends else nullcontext():
        return attempt(fit, ENDS[name][0], strategy=make_strategy(SECONDS), **kwargs)


SENT = {"killed", "hangs", "saves alone"}
# only in memory a process knows which one of three is late
IN_ALL = ENDS.keys() - {"hangs" if IN_MEMORY else "one of three hangs"}


@pytest.mark.parametrize(
    ("name", "sends"),
    [*((each, False) for each in sorted(IN_ALL)), *((each, True) for each in sorted(SENT))],
)
def test_a_process_that_fails_ends_all(name, sends):
    expected = ENDS[name][1]
    for found, said in zip(run_in_processes(len(expected), fit_one, name, sends), expected):
        assert found == said or (said in found and "\n" not in found), found


def fit_ring(superstep):
    """Process 1 is killed in a superstep of its second update of four parameters."""
    advance, calls = Execution.advance, count()

    def advance_or_die(run, number, *parts):
        if rank() == 1 and number == superstep and next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return advance(run, number, *parts)

    strategy = make_strategy(SECONDS, allreduce=ring_allreduce, as_written=True)
    with mock.patch.object(Execution, "advance", advance_or_die):
        return attempt(fit, strategy=strategy)


@pytest.mark.parametrize("superstep", [0, 1, 3])
def test_a_process_killed_within_a_ring(superstep):
    first, killed, last = run_in_processes(3, fit_ring, superstep)
    assert killed == -signal.SIGKILL
    assert all(ENDED in each and "\n" not in each for each in (first, last)), (first, last)


def save_at_an_exception(path):
    return fit_one("raises", callbacks=[OnExceptionCheckpoint(path)], enable_checkpointing=True)


def test_no_exception_is_lost_behind_a_checkpoint(tmp_path):
    found = run_in_processes(2, save_at_an_exception, str(tmp_path))
    assert ENDED in found[0] and found[1] == "KeyError: 'mine'"
    assert (tmp_path / "on_exception.ckpt").exists()


def count_after_each_fit():
    counts = []
    gc.disable()  # it would free the memory later
    for _ in range(4):
        fit(max_epochs=1)
        num_mapped = Path("/proc/self/maps").read_text().count("memfd:lightning_mgpu")
        counts.append((*(len(os.listdir(f"/proc/self/{x}")) for x in ("fd", "task")), num_mapped))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_fit_leaves_no_files_threads_and_memory():
    for counts in run_in_processes(2, count_after_each_fit):
        assert counts[1:] == counts[:1] * 3 and counts[0][2] == 0, counts


SCRIPT = """
import os, sys, time
from tests.strategies.conftest import Net, fit

class Steps(Net):
    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (0, 3):
            line = f"process {self.global_rank} {os.getpid()}\\n"
            os.write(1, line.encode())  # at once, or it could be within another process's line
            time.sleep(300 * self.global_rank if "hangs" in sys.argv else 0)
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    if "late" in sys.argv and "LOCAL_RANK" in os.environ:
        print("process 1 is late", flush=True)
        time.sleep(2)
    fit(Steps, devices=2, strategy="manual_allreduce", max_epochs=10_000)
"""
MOST = 30  # seconds: two on an idle machine, which Python needs to end; `timeout` is five minutes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how"),
    [
        pytest.param(signal.SIGKILL, "late", marks=pytest.mark.weekly),
        (signal.SIGKILL, "hangs"),
        pytest.param(signal.SIGTERM, "hangs", marks=pytest.mark.weekly),
    ],
)
def test_a_signal_ends_both(number, how, command, tmp_path):
    """Before they meet, and in a step: no process is left behind."""
    (tmp_path / "train.py").write_text(SCRIPT)
    process = command.start(launcher=("train.py", how))
    assert any(line.startswith("process 1") for line in process.stdout)
    process.send_signal(number)
    command.finish(process, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], pytest.param([0, 1], marks=pytest.mark.weekly)])
def test_sigterm_ends_all_after_the_step(ranks, command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    process = command.start(launcher=("train.py",))
    lines = (line.split() for line in process.stdout if line.startswith("process "))
    ids = dict([next(lines)[1:], next(lines)[1:]])
    start = time.monotonic()
    for each in ranks:
        os.kill(int(ids[str(each)]), signal.SIGTERM)
    status, _, err = command.finish(process, timeout=60)
    assert time.monotonic() - start < MOST, err
    if ranks == [1]:
        assert status > 0 and "PeerFailure: process 1 exited unexpectedly" in err
    else:
        assert status == 0, err
