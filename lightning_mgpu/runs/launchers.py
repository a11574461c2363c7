"""Several machines: what torchrun and SLURM say of them. All else about launchers is Lightning's.

torchrun --nnodes=2 ... -m lightning_mgpu fit       # num_nodes and devices are torchrun's
srun python -m lightning_mgpu fit                   # are SLURM's
"""

import os
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment


def follow_launcher(config: Namespace) -> None:
    """Take the Trainer's `num_nodes` and `devices` from torchrun or SLURM where nobody gave any."""
    env = os.environ
    if TorchElasticEnvironment.detect():
        per_node = int(env.get("LOCAL_WORLD_SIZE", "1"))
        num_nodes = int(env["WORLD_SIZE"]) // per_node
    elif SLURMEnvironment.detect():
        num_nodes = int(env.get("SLURM_NNODES", "1"))
        per_node = int(env.get("SLURM_NTASKS_PER_NODE") or int(env["SLURM_NTASKS"]) // num_nodes)
    else:
        return
    if config.num_nodes == 1:
        config.num_nodes = num_nodes
    if config.devices == "auto" and per_node > 1:  # one process may drive all devices of its machine
        config.devices = per_node


def job_name() -> str | None:
    """A name that all machines and all restarts of a SLURM job agree on, as they would not on the time of day."""
    if not SLURMEnvironment.detect():
        return None
    return f"slurm_{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '0')}"


def requeued_run(run_dir: str | None) -> Path | None:
    """The run of this job, if SLURM has queued the job again and its run had begun."""
    if not SLURMEnvironment.detect() or os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    path = Path(run_dir or Path("runs", str(job_name())))
    return path if (path / "config.yaml").is_file() else None
