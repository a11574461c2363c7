"""Where the time of a step goes: a table of operators and a trace for chrome://tracing or ui.perfetto.dev."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lightning_mgpu.callbacks.run_directory import run_directory


class Profile(Callback):
    """Writes `profile.txt` and `trace.json` (processes after the first: `profile_1.txt`, ...) to the run directory.

    Lightning's own `PyTorchProfiler` sees the thread that starts it; this one sees all threads.

    Args:
        skip: Batches at the start that are left out: the first ones set things up.
        num_batches: Batches that are looked at.
        row_limit: Operators in the table, those that take longest first.
    """

    def __init__(self, skip: int = 3, num_batches: int = 5, row_limit: int = 40) -> None:
        if skip < 1 or num_batches < 1:
            raise ValueError(f"skip={skip}, num_batches={num_batches}: both must be at least 1.")
        self.skip = skip
        self.num_batches = num_batches
        self.row_limit = row_limit
        self._directory: Path | None = None
        self._profile: profile | None = None
        self._written = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._directory = trainer.strategy.broadcast(run_directory(trainer))
        self._suffix = f"_{trainer.global_rank}" if trainer.global_rank else ""
        if self._directory is None:  # fast_dev_run
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it complains of missing GPUs
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=schedule(wait=self.skip - 1, warmup=1, active=self.num_batches, repeat=1),
            on_trace_ready=self._write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._profile is not None and not self._written:
            self._profile.step()
            if self._written:
                self._stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:  # it has not seen all it waits for
            rank_zero_warn(
                f"the run was too short for Profile, which looks at {self.num_batches} batches after {self.skip}: "
                "profile.txt shows less, or is not there."
            )
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _write(self, finished: profile) -> None:
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)  # on another machine
        trace, table = (self._directory / name for name in (f"trace{self._suffix}.json", f"profile{self._suffix}.txt"))
        finished.export_chrome_trace(str(trace))
        key = "self_cuda_time_total" if ProfilerActivity.CUDA in finished.activities else "self_cpu_time_total"
        table.write_text(finished.key_averages().table(sort_by=key, row_limit=self.row_limit))
        self._written = True
        if not self._suffix:
            print(f"profile:  {table} and {trace} (open it in ui.perfetto.dev)", flush=True)

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
