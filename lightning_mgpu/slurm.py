"""A job on SLURM that outlives its time limit: it stops between two batches, is queued again, and goes on.

    #SBATCH --signal=SIGUSR1@90 --requeue     # see configs/slurm/fit.sbatch

SLURM sends the signal 90 s before the limit; the checkpoint is the `last.ckpt` of `--resume`. Lightning's own handler
would save in the middle of a batch, and train on beyond what it saved until SLURM ends it.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from lightning_mgpu.arguments import given_options
from lightning_mgpu.checkpoint_io import LAST, PREVIOUS


def is_slurm_job() -> bool:
    """Whether `srun` started this process, as Lightning tells it: not in an interactive shell."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def job_name() -> str | None:
    """A name for the run that all machines and all restarts of a job agree on, as they would not on the time of day."""
    if not is_slurm_job():
        return None
    return f"slurm_{_job_id()}.{os.environ.get('SLURM_STEP_ID') or _command()}"


def is_restart() -> bool:
    """Whether SLURM starts this job again."""
    return is_slurm_job() and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def with_requeued_job(args: list[str]) -> list[str]:
    """The arguments, or for a `fit` that SLURM starts again those that resume it where it has saved a checkpoint."""
    if not is_restart() or args[:1] != ["fit"]:
        return args
    given = given_options(args)
    if given.get("resume"):
        return args
    if given.get("run_dir"):
        candidates = [_path(given["run_dir"])]
    else:  # restarts before there was a checkpoint have a number after the name
        runs = _path(given.get("trainer.default_root_dir") or "runs")
        candidates = [runs / str(job_name()), *runs.glob(f"{job_name()}_*")]
    saved = [
        (path.stat().st_mtime, config.stat().st_mtime, run)
        for run in candidates
        for path in _last(_path(given.get("checkpoint.dirpath") or run / "checkpoints"))
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


def _path(given: str | Path) -> Path:
    return Path(os.path.expanduser(given))


def _command() -> str:
    """A short name for the command line: without `srun`, nothing else tells a script's several commands apart."""
    return hashlib.sha256("\0".join(sys.orig_argv).encode(errors="surrogateescape")).hexdigest()[:6]


def _job_id() -> str:
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]
