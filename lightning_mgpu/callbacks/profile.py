"""Where the time of a step goes: a table of operators and a trace for chrome://tracing or ui.perfetto.dev."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, schedule
from typing_extensions import override

from lightning_mgpu.runs.directory import run_directory

SKIP, NUM_BATCHES = 3, 5  # batches that set things up, and those that are looked at


class Profile(Callback):
    """Writes `profile.txt` and `trace.json` of the first process to the run directory, of five batches after three.

    Lightning's own `PyTorchProfiler` sees the thread that starts it, and keeps what was validated last.
    """

    _profile: profile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if directory := run_directory(trainer):  # none in another process, and in a fast_dev_run
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it complains of missing GPUs
            self._profile = profile(
                schedule=schedule(wait=SKIP - 1, warmup=1, active=NUM_BATCHES, repeat=1),
                on_trace_ready=partial(write, directory),
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._profile.start()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._profile is not None:
            self._profile.step()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profile is not None:
            self._profile.stop()
            if self._profile.step_num < SKIP + NUM_BATCHES:
                rank_zero_warn(
                    f"Profile looks at {NUM_BATCHES} batches after {SKIP}, and the run was too short for it."
                )


def write(directory: Path, finished: profile) -> None:
    table, trace = directory / "profile.txt", directory / "trace.json"
    finished.export_chrome_trace(str(trace))
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table.write_text(finished.key_averages().table(sort_by=key, row_limit=40))
    print(f"profile:  {table} and {trace} (open it in ui.perfetto.dev)", flush=True)
