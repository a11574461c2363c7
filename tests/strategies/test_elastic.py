"""A run that loses a machine goes on by itself on the other, and ends in the same weights."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "elastic.sh"
RUN = (
    *("--data.source=synthetic", "--data.batch_size=30", "--trainer.accelerator=cpu"),
    *("--trainer.max_epochs=3", "--trainer.limit_train_batches=30"),
    *("--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"),
    *("--trainer.strategy=manual_allreduce", "--trainer.strategy.replicas=4"),
)


def ended(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "run.json").read_text())["end"])


def kill_with_children(process: subprocess.Popen) -> None:
    """As a machine that loses its power. torchrun gives its workers groups of their own."""
    os.kill(process.pid, signal.SIGSTOP)  # it must not see its worker's end
    subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=True)
    process.kill()


@pytest.mark.slow
def test_a_run_that_loses_a_machine_ends_in_the_same_weights(
    command: Any, main: Callable[..., int], tmp_path: Path
) -> None:
    """Two agents of torchrun play two machines. One is killed in the second epoch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for is_host in ("true", "false"):
        conf = f"is_host={is_host},last_call_timeout=3,keep_alive_interval=1"
        launcher = (
            *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *(f"--rdzv-conf={conf}", "--no-python", "bash", str(SCRIPT), "job"),
        )
        agents.append(command.start(*RUN, "--trainer.devices=2", launcher=launcher))
    survivor, lost = agents
    deadline = time.monotonic() + 90
    while not (tmp_path / "job" / "checkpoints" / "last.ckpt").exists():  # after the first epoch
        assert survivor.poll() is None and time.monotonic() < deadline, survivor.communicate()
        time.sleep(0.02)
    kill_with_children(lost)
    code, out, err = command.finish(survivor, timeout=120)
    assert code == 0, err
    assert "has ended, for which process" in err  # said by a process that had another one
    assert "on 2 x cpu" in out and "job/checkpoints/last.ckpt" in out  # resumed, without it
    assert main("fit", *RUN, "--run_dir=whole", "--trainer.devices=1") == 0
    assert ended(tmp_path / "job")["fingerprint"] == ended(tmp_path / "whole")["fingerprint"]
