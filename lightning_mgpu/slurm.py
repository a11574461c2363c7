"""A job on SLURM that outlives its time limit: it stops between two batches, is queued again, and goes on.

    #SBATCH --signal=SIGUSR1@90 --requeue     # see configs/slurm/fit.sbatch

SLURM sends the signal 90 s before the limit; the checkpoint is the `last.ckpt` of `--resume`. Lightning's own handler
would save in the middle of a batch, and train on beyond what it saved until SLURM ends it.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from lightning_mgpu.arguments import find_config
from lightning_mgpu.checkpoint_io import LAST, PREVIOUS
from lightning_mgpu.tracking.flat import flatten


def is_slurm_job() -> bool:
    """Whether `srun` started this process, as Lightning tells it: not in an interactive shell."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def job_name() -> str | None:
    """A name for the run that all machines and all restarts of a job agree on, as they would not on the time of day."""
    if not is_slurm_job():
        return None
    return f"slurm_{_job_id()}.{os.environ.get('SLURM_STEP_ID', '0')}"


def with_requeued_job(args: list[str]) -> list[str]:
    """The arguments, or for a `fit` that SLURM starts again those that resume it where it has saved a checkpoint."""
    is_restart = is_slurm_job() and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if not is_restart or args[:1] != ["fit"]:
        return args
    given = _given(args)
    if given.get("resume"):
        return args
    if given.get("run_dir"):
        candidates = [Path(given["run_dir"])]
    else:  # restarts before there was a checkpoint have a number after the name
        runs = Path(given.get("trainer.default_root_dir") or "runs")
        candidates = [runs / str(job_name()), *runs.glob(f"{job_name()}_*")]
    saved = [
        (path.stat().st_mtime, config.stat().st_mtime, run)
        for run in candidates
        for path in _last(Path(given.get("checkpoint.dirpath") or run / "checkpoints"))
        if (config := run / "config.yaml").is_file()
    ]
    return ["fit", f"--resume={max(saved)[-1]}"] if saved else args


def requeue() -> str:
    """Ask SLURM to start this job again; says in words what it answered."""
    command = ["scontrol", "requeue", _job_id()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"'{' '.join(command)}' failed: {error}"
    if result.returncode != 0:
        return f"'{' '.join(command)}' failed: {result.stderr.strip()}"
    return f"SLURM job {_job_id()} is queued again"


def _last(checkpoints: Path) -> list[Path]:
    return [path for name in (LAST, PREVIOUS) if (path := checkpoints / name).is_file()]


def _job_id() -> str:
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def _given(args: list[str]) -> dict[str, Any]:
    """What options were given, by name: as flags, and in `--config` files; of two the later one counts."""
    given: dict[str, Any] = {}
    for i, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        name, has_value, value = arg.partition("=")
        if not has_value:
            value = args[i + 1] if i + 1 < len(args) else ""
        if name in ("--config", "-c"):
            config = find_config(value)
            given |= flatten(yaml.safe_load(config if config.startswith("{") else Path(config).read_text()) or {})
        else:
            given[name.removeprefix("--")] = value
    return given
