"""Starting jobs and ending them: scripts, and a command with all its children."""

import os
import subprocess
from pathlib import Path

import pytest

from lightning_mgpu.tools import run_in_group

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_a_slurm_job_that_is_queued_again_goes_on(tmp_path):
    """The script calls a stand-in for `srun`, which prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}

    def started(restarts):
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {"PATH": path, **slurm, "SLURM_RESTART_COUNT": restarts}
        line = ["bash", str(SCRIPTS / "fit.sbatch"), "--model=ResNet18"]
        out = subprocess.check_output(line, cwd=tmp_path, env=env, text=True)
        return out.strip().removeprefix("python -m lightning_mgpu fit ")

    given = "--trainer.strategy=ddp --run_dir=runs/slurm_7 --trainer.num_nodes=2"
    assert started("0") == f"{given} --trainer.devices=4 --model=ResNet18"
    # the job ended before its run began
    assert started("1") == started("0")
    (tmp_path / "runs/slurm_7").mkdir(parents=True)
    (tmp_path / "runs/slurm_7/config.yaml").touch()
    assert started("1") == "--resume=runs/slurm_7"


def test_ctrl_c_ends_a_process_and_its_children(monkeypatch):
    reads, writes = os.pipe()

    def interrupted(process):
        assert os.read(reads, 3) == b"up\n"  # the child's
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), os.fdopen(writes, "w") as output:
        run_in_group(["sh", "-c", "sh -c 'echo up; exec sleep 999'; true"], output)
    assert os.read(reads, 1) == b""  # no process is left that could write
