"""Times the steps of a training run, counts the bytes that its machine sends, and slows it down."""

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_mgpu.network.links import DEVICE, seconds_without_core
from lightning_mgpu.runs.record import RunRecord

CLOCK = "LIGHTNING_MGPU_CLOCK"  # the number of an open file; without it, nothing is measured
NETWORK = "LIGHTNING_MGPU_NETWORK"  # what `run.json` gets
WARM_UP = 32  # steps
NUM_DRAWN = 3  # steps after these, or so many that one of them exchanges weights


class StepClock(Callback):
    """Writes a line per batch: `step`, the machine, and the columns of `steps.COLUMNS`.

    And a line for each bar of the picture: `span`, the machine, kind, begin and end.
    """

    file: int | None = None
    spans: list[tuple[str, float, float]] | None = None  # of the steps that are drawn
    now, since = "", 0.0  # the span that has begun
    before: Any = None  # the counts at the end of the last step, if this one follows on it

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if CLOCK not in os.environ:
            return
        self.file, self.sent, self.num_steps, self.slept = int(os.environ[CLOCK]), 0, 0, 0.0
        network = json.loads(os.environ[NETWORK])
        self.slow, self.slept_at = network["slow"][trainer.global_rank], cpu_seconds(trainer)
        for record in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(record, RunRecord) and record.lock is not None:
                record.write(network=network)
                self.write("run", record.run_dir)

    def write(self, *values: Any) -> None:
        assert self.file is not None
        os.write(self.file, (" ".join(map(str, values)) + "\n").encode())

    def on_train_epoch_start(self, *args: Any) -> None:
        self.before = None

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = None
        if self.file is not None and not trainer.sanity_checking:
            pl_module.log("sent_mb", bytes_sent() / 1e6, sync_dist=True)

    def on_train_batch_start(self, *args: Any) -> None:
        self.begin("forward")

    def on_before_backward(self, *args: Any) -> None:
        self.begin("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.begin("update")

    def begin(self, kind: str) -> None:
        """End the span that has begun."""
        now = time.monotonic()
        if self.spans is not None and self.now:
            self.spans.append((self.now, self.since, now))
        self.now, self.since = kind, now

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.file is None:
            return
        self.begin("")
        if self.slow > 1:
            seconds = (self.slow - 1) * (cpu_seconds(trainer) - self.slept_at)
            time.sleep(seconds)
            self.slept += seconds
            self.slept_at = cpu_seconds(trainer)
        meeting = getattr(trainer.strategy, "meeting", None)  # `ddp` waits in C++
        waited = meeting.seconds_in_wait if meeting else float("nan")
        used, without = time.thread_time(), seconds_without_core("schedstat")
        now = time.monotonic(), self.slept + cpu_seconds(trainer), waited, used, without
        nan = [float("nan")] * len(now)
        times = [b - a for a, b in zip(self.before, now)] if self.before else nan
        self.before, before, self.sent = now, self.sent, bytes_sent()
        every = trainer.accumulate_grad_batches * (getattr(trainer.strategy, "every", 0) or 1)
        columns = args[3], *times[:3], self.sent - before, *times[3:], every
        self.write("step", trainer.global_rank, *columns)
        self.num_steps += 1
        if self.num_steps == WARM_UP:
            self.spans = []
            if meeting:
                meeting.spans = self.spans
        elif self.spans and self.num_steps == WARM_UP + max(NUM_DRAWN, every + 1):
            for span in [*self.spans]:
                self.write("span", trainer.global_rank, *span)
            self.spans = None
            if meeting:
                meeting.spans = None


def bytes_sent() -> int:
    """By this machine, in all."""
    devices = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in devices if f"{DEVICE}:" in line).split()[9])


def cpu_seconds(trainer: Trainer) -> float:
    """CPU time of the main thread, without that in which it has waited for other processes."""
    meeting = getattr(trainer.strategy, "meeting", None)
    return time.thread_time() - (0.0 if meeting is None else meeting.cpu_seconds_in_wait)
