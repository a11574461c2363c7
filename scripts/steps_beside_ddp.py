"""Prints the median milliseconds of a step with a plain DataLoader, on two CPU processes.

    OMP_NUM_THREADS=1 python scripts/steps_beside_ddp.py manual_allreduce LeNet 256 150
    OMP_NUM_THREADS=1 python scripts/steps_beside_ddp.py ddp LeNet 256 150

Run both in turn several times: the speed of a machine drifts. The arguments are the strategy, the
model, the global batch size and the number of steps.
"""

import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu import models

WARM_UP = 10  # steps


class Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())


if __name__ == "__main__":
    strategy, name, batch_size, num_steps = *sys.argv[1:3], *map(int, sys.argv[3:5])
    seed_everything(0, verbose=False)
    num = batch_size * (WARM_UP + num_steps)
    data = TensorDataset(torch.rand(num, 1, 28, 28), torch.arange(num) % 10)
    per_process = batch_size // 2 if strategy == "ddp" else batch_size
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: Any = dict.fromkeys(off, False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=Clock(), **quiet
    )
    trainer.fit(getattr(models, name)(), DataLoader(data, per_process, shuffle=True))
    if trainer.is_global_zero:
        times = next(each.times for each in trainer.callbacks if isinstance(each, Clock))[WARM_UP:]
        steps = [after - before for before, after in pairwise(times)]
        print(f"{strategy}: {1000 * median(steps):.1f} ms per step")
