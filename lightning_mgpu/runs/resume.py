"""`fit --resume`: go on with a run in its own directory, as if it had never stopped.

    python -m lightning_mgpu fit --resume=last
    python -m lightning_mgpu fit --resume=runs/NAME --trainer.max_epochs=20

The run's `config.yaml` is the configuration. Beside `--resume` stand only flags that do not change what is computed, or
for how long.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mgpu.runs.checkpoint_file import LAST, PREVIOUS, read_checkpoint
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.redact import is_secret

FLAG = "--resume"
RUNS = Path("runs")
# how long, where and what is shown; a checkpoint goes on under any strategy and number of devices
MAY_CHANGE = (
    *(f"trainer.{name}" for name in ("accelerator", "strategy", "devices", "num_nodes", "plugins")),
    *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")),
    *(f"trainer.{name}" for name in ("enable_progress_bar", "profiler", "limit_test_batches", "logger")),
    *(f"data.{name}" for name in ("root", "num_workers", "pin_memory")),
    *("wandb", "no-wandb", "malloc", "traceback", "print_config"),
)


def find_run(name: str) -> Path:
    """The run directory of this name; for `last` the one in `runs/` whose checkpoint is the newest.

    Raises:
        UsageError: If there is none.
    """
    if name != "last":
        run_dir = Path(os.path.expanduser(name))
        if not (run_dir / "config.yaml").is_file():
            raise UsageError(f"{FLAG}={name}: no run directory, which has a config.yaml")
        return run_dir
    saved = [path for path in RUNS.glob("*/checkpoints/*.ckpt") if path.name in (LAST, PREVIOUS)]
    if not saved:
        raise UsageError(f"{FLAG}=last: no run in {RUNS}/ has a checkpoint; name the directory of one")
    return max(saved, key=lambda path: path.stat().st_mtime).parents[1]


def check_given(run_dir: Path, given: dict[str, Any]) -> None:
    """Refuse options that would make the run another one.

    Raises:
        UsageError: For the first of them.
    """
    for key, value in given.items():
        if is_secret(key.rpartition(".")[2], value):
            continue  # which the configuration leaves out
        if not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE):
            raise UsageError(
                f"--{key}={value} would make {run_dir} another run: leave it out, or start a new run from its "
                "checkpoint with --ckpt_path"
            )


def choose_checkpoint(run_dir: Path, max_epochs: int | None = None) -> Path | None:
    """The newest checkpoint that is whole; none if the run was stopped before its first epoch was over.

    Raises:
        UsageError: If all are damaged, or the run has been trained for longer than `max_epochs` already.
    """
    candidates = [path for path in (run_dir / "checkpoints" / name for name in (LAST, PREVIOUS)) if path.exists()]
    candidates += run_dir.glob("hpc_ckpt_*.ckpt")  # Lightning's, before the time of a SLURM job is up
    problems: list[UsageError] = []
    for path in sorted(candidates, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            checkpoint = read_checkpoint(path)
        except UsageError as error:
            problems.append(error)
            continue
        trained = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        if max_epochs is not None and 0 <= max_epochs < trained:
            raise UsageError(f"--trainer.max_epochs={max_epochs}: {run_dir} has trained {trained} epochs already")
        if problems:
            rank_zero_warn(f"{problems[0]}. Going on from {path.name}, saved before.")
        return path
    if problems:
        raise problems[0]
    return None


def how_to_resume(run_dir: Path) -> str:
    """The command that goes on with a run, to be pasted into a shell."""
    return f"python -m lightning_mgpu fit {FLAG}={shlex.quote(str(run_dir))}"
