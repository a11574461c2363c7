"""Times the steps of a training run, counts the bytes that its machine sends, and slows it down."""

import json
import os
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mgpu.network.links import DEVICE, seconds_without_core
from lightning_mgpu.runs.record import RunRecord

CLOCK = "LIGHTNING_MGPU_CLOCK"  # the number of an open file; without it, nothing is measured
NETWORK = "LIGHTNING_MGPU_NETWORK"  # what `run.json` gets
WARM_UP = 32  # steps


class StepClock(Callback):
    """Writes a line per batch: machine, batch, seconds, bytes sent by then, and `every`.

    The last two are seconds of the main thread: with a core, and without one when it could run.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if file := os.environ.get(CLOCK):
            network = json.loads(os.environ[NETWORK])
            self.slow, self.slept_at = network["slow"][trainer.global_rank], cpu_seconds(trainer)
            for record in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(record, RunRecord) and record.lock is not None:
                    record.write(network=network)
                    os.write(int(file), f"run {record.run_dir}\n".encode())

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if file := os.environ.get(CLOCK):
            time.sleep((self.slow - 1) * (cpu_seconds(trainer) - self.slept_at))
            self.slept_at = cpu_seconds(trainer)
            devices = Path("/proc/self/net/dev").read_text().splitlines()
            sent = next(line for line in devices if f"{DEVICE}:" in line).split()[9]
            every = trainer.accumulate_grad_batches * (getattr(trainer.strategy, "every", 0) or 1)
            step = f"{trainer.global_rank} {args[3]} {time.perf_counter()} {sent} {every}"
            line = f"{step} {time.thread_time()} {seconds_without_core('schedstat')}\n"
            os.write(int(file), line.encode())


def cpu_seconds(trainer: Trainer) -> float:
    """CPU time of the main thread, without that in which it has waited for other processes."""
    meeting = getattr(trainer.strategy, "meeting", None)  # `ddp` waits in C++
    return time.thread_time() - (0.0 if meeting is None else meeting.cpu_seconds_in_wait)


def read_run(file: IO[bytes]) -> Path | None:
    """The run directory, if training has begun."""
    file.seek(0)
    return next((Path(line[4:-1].decode()) for line in file if line[:4] == b"run "), None)


def read_steps(file: IO[bytes], machine: int) -> tuple[float, ...]:
    """MB sent in all; MB, ms and median ms per step, over whole windows of `every` steps.

    And the share of a core that the main thread had of those that it needed.
    """
    file.seek(0)
    lines = [line.split() for line in file if line[:4] != b"run "]
    rows = np.array(lines, float).reshape(-1, 7)
    rows = rows[rows[:, 0] == machine, 1:]
    differences = np.diff(rows, axis=0)
    is_step = differences[:, 0] == 1  # within an epoch
    steps = differences[is_step, 1:3][WARM_UP:]
    every = int(rows[-1, 3]) if len(rows) else 1
    num = len(steps) // every * every
    ms, megabytes = (steps[:num] * (1e3, 1e-6)).T if num else np.full((2, 1), np.nan)
    used, waited = differences[is_step, 4:].sum(0)
    share = used / (used + waited) if used else np.nan
    return rows[:, 2].max(initial=0) / 1e6, megabytes.mean(), ms.mean(), float(np.median(ms)), share
