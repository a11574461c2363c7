"""Times training steps, counts the bytes that a machine sends, and emulates stragglers.

Only the first process of each machine writes measurements.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mgpu.lab.network.links import DEVICE, seconds_without_core
from lightning_mgpu.runs.record import RunRecord

CLOCK = "LIGHTNING_MGPU_CLOCK"  # a file descriptor; if unset, nothing is measured
NETWORK = "LIGHTNING_MGPU_NETWORK"  # settings for `run.json`
WARM_UP = 32  # steps


class StepClock(Callback):
    """Writes a line per batch, and one per span of the timeline: see `Steps`."""

    file = 0  # a descriptor, or 0: nothing is measured
    now, since = "", 0.0  # the current span
    before: Any = None  # counters at the end of the previous step; None after a pause

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if CLOCK not in os.environ:
            return
        self.file, self.sent, self.num_steps = int(os.environ[CLOCK]), 0, 0
        self.spans: list[tuple[str, float, float]] = []
        self.control = getattr(trainer.strategy, "control", None)  # `ddp` waits in C++
        if self.control:
            self.control.spans = self.spans
        network = json.loads(os.environ[NETWORK])
        self.slowdown, self.slept_at = network["slowdown"][trainer.node_rank], self.cpu_seconds()
        self.machine = trainer.node_rank if trainer.local_rank == 0 else None
        for record in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(record, RunRecord) and record.lock is not None:
                record.write(network=network)
                self.write("run", record.run_dir)

    def write(self, *values: Any) -> None:
        if self.machine is None:
            return
        os.write(self.file, (" ".join(map(str, values)) + "\n").encode())

    def cpu_seconds(self) -> float:
        """CPU time of the main thread, excluding waits for other processes."""
        return time.thread_time() - (self.control.cpu_seconds_in_wait if self.control else 0.0)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = None
        if self.file and not trainer.sanity_checking:
            pl_module.log("sent_mb", bytes_sent() / 1e6, sync_dist=True)

    def on_train_batch_start(self, *args: Any) -> None:
        self.begin("forward")

    def on_before_backward(self, *args: Any) -> None:
        self.begin("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.begin("update")

    def begin(self, kind: str) -> None:
        """End the current span and begin the next."""
        now = time.monotonic()
        if self.now and self.file:
            self.spans.append((self.now, self.since, now))
        self.now, self.since = kind, now

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not self.file:
            return
        self.begin("")
        time.sleep((self.slowdown - 1) * (self.cpu_seconds() - self.slept_at))
        self.slept_at = self.cpu_seconds()
        waited = self.control.seconds_in_wait if self.control else float("nan")
        main_thread = time.thread_time(), seconds_without_core("schedstat")
        now = time.monotonic(), self.slowdown * self.slept_at, waited, *main_thread
        nan = [float("nan")] * len(now)
        is_first = self.before is None or args[3] == 0
        times = nan if is_first else [b - a for a, b in zip(self.before, now)]
        self.before, before, self.sent = now, self.sent, bytes_sent()
        every = trainer.accumulate_grad_batches * (getattr(trainer.strategy, "sync_every", 0) or 1)
        columns = args[3], *times[:3], self.sent - before, *times[3:], every
        self.write("step", self.machine, *columns)
        self.num_steps += 1
        is_drawn = WARM_UP < self.num_steps <= WARM_UP + max(3, every + 1)
        for span in [*self.spans] if is_drawn else ():
            self.write("span", self.machine, *span)
        self.spans.clear()


def bytes_sent() -> int:
    """Total bytes sent by this machine."""
    devices = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in devices if f"{DEVICE}:" in line).split()[9])
