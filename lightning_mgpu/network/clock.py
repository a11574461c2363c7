"""Times the steps of a training run, and counts the bytes that its machine sends."""

import os
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
from lightning.pytorch import Callback, Trainer

from lightning_mgpu.network.links import DEVICE

CLOCK = "LIGHTNING_MGPU_CLOCK"  # the number of an open file; without it, nothing is measured
WARM_UP = 32  # steps


class StepClock(Callback):
    """Writes a line per batch: machine, batch, seconds, bytes sent by then, and `every`."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if file := os.environ.get(CLOCK):
            devices = Path("/proc/self/net/dev").read_text().splitlines()
            sent = next(line for line in devices if f"{DEVICE}:" in line).split()[9]
            every = trainer.accumulate_grad_batches * (getattr(trainer.strategy, "every", 0) or 1)
            line = f"{trainer.global_rank} {args[3]} {time.perf_counter()} {sent} {every}\n"
            os.write(int(file), line.encode())


def read_steps(file: IO[bytes], machine: int) -> tuple[float, ...]:
    """MB sent in all; MB, ms and median ms per step, over whole windows of `every` steps."""
    file.seek(0)
    rows = np.array([line.split() for line in file], float).reshape(-1, 5)
    rows = rows[rows[:, 0] == machine, 1:]
    differences = np.diff(rows, axis=0)
    steps = differences[differences[:, 0] == 1, 1:3][WARM_UP:]  # each within an epoch
    every = int(rows[-1, 3]) if len(rows) else 1
    num = len(steps) // every * every
    ms, megabytes = (steps[:num] * (1e3, 1e-6)).T if num else np.full((2, 1), np.nan)
    return rows[:, 2].max(initial=0) / 1e6, megabytes.mean(), ms.mean(), float(np.median(ms))
