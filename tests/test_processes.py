"""Several processes: Lightning's launchers, loaders that share no batch, a common end."""

import csv
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.processes import run_in_group
from lightning_mgpu.project import find_configs
from tests.runs.conftest import OWN


@pytest.mark.slow
def test_processes_of_manual_allreduce_are_one_run(command: Any, tmp_path: Path) -> None:
    """One process, two that Lightning starts, two by torchrun: with workers that draw, too."""
    (tmp_path / "own_run.py").write_text(OWN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ways: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "alone": ((), ("-m", "lightning_mgpu")),
        "launched": (("--trainer.strategy.processes=2",), ("-m", "lightning_mgpu")),
        "torchrun": ((), (*torchrun, "-m", "lightning_mgpu")),
    }
    fingerprints = {}
    for name, (options, launcher) in ways.items():
        run = (
            *("--model=own_run.Net", "--data=own_run.Shuffled", "--data.num_workers=1"),
            *("--trainer.accelerator=cpu", "--trainer.max_epochs=2", f"--run_dir={name}"),
            *("--trainer.strategy=manual_allreduce", "--trainer.strategy.replicas=4"),
            *("--trainer.devices=2", *options),
        )
        started = command.start("fit", *run, launcher=launcher)
        code, out, err = command.finish(started, timeout=150)
        assert code == 0, err
        assert out.count("fingerprint: ") == 1 and "ManualAllreduceStrategy" in out
        (fingerprints[name],) = (line for line in out.splitlines() if "fingerprint" in line)
    assert len({*fingerprints.values()}) == 1, fingerprints
    assert {*map(str, tmp_path.glob("*/run.json"))} == {
        str(tmp_path / name / "run.json") for name in ways
    }


@pytest.mark.slow
def test_two_machines_by_torchrun(command: Any, tmp_path: Path) -> None:
    """A process on each of two machines, here one; their data module shares no global batch."""
    (tmp_path / "own_run.py").write_text(OWN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank in (0, 1):
        where = (
            f"--node_rank={rank}",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--master_addr=127.0.0.1",
        )
        launcher = (
            "-m",
            "torch.distributed.run",
            *where,
            f"--master_port={port}",
            "-m",
            "lightning_mgpu",
        )
        run = (
            "--trainer.accelerator=cpu",
            "--trainer.max_epochs=1",
            "--run_dir=run",
        )
        own = ("--model=own_run.Net", "--data=own_run.Shuffled")  # and `auto` is ddp over all
        nodes.append(command.start("fit", *own, *run, launcher=launcher))
    (code, out, err), (second, second_out, second_err) = (
        command.finish(node, timeout=120) for node in nodes
    )
    assert code == second == 0, err + second_err
    assert "strategy: DDPStrategy on 2 x cpu" in out and "batch:    16 global, 8 per device" in out
    told = (
        "each of the 2 processes takes batches of its own: make the loader with lightning_mgpu.data"
    )
    assert f"{told}.batch_loader" in err
    assert "test" not in second_out
    # which one is the newest
    assert len(list((tmp_path / "runs").iterdir())) == 1
    (epoch,) = [
        row
        for row in csv.DictReader((tmp_path / "run" / "metrics.csv").open())
        if row["epoch_seconds"]
    ]
    assert int(epoch["step"]) == 2  # 40 samples in three steps of 16


def test_a_slurm_job_that_is_queued_again_goes_on(tmp_path: Path) -> None:
    """The script calls a stand-in for `srun`, which prints its arguments."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)

    def started(**variables: str) -> str:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "4"}
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm, **variables}
        script = [
            "bash",
            str(find_configs("lightning_mgpu").parent / "scripts" / "fit.sbatch"),
            "--model=ResNet18",
        ]
        done = subprocess.run(
            script, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.strip().removeprefix("python -m lightning_mgpu fit ")

    given = "--trainer.strategy=ddp --run_dir=runs/slurm_7 "
    given += "--trainer.num_nodes=1 --trainer.devices=4"
    assert started() == f"{given} --model=ResNet18"
    # the job ended before its run began
    assert started(SLURM_RESTART_COUNT="1") == f"{given} --model=ResNet18"
    (tmp_path / "runs" / "slurm_7").mkdir(parents=True)
    (tmp_path / "runs" / "slurm_7" / "config.yaml").touch()
    assert started(SLURM_RESTART_COUNT="1") == "--resume=runs/slurm_7"


def test_ctrl_c_ends_a_process_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()

    def interrupted(process: subprocess.Popen) -> int:
        assert os.read(reads, 3) == b"up\n"  # the child's
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), os.fdopen(writes, "w") as output:
        run_in_group(["sh", "-c", "sh -c 'echo up; exec sleep 999'; true"], output)
    assert os.read(reads, 1) == b""  # no process is left that could write
