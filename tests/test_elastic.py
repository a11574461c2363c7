"""scripts/elastic.sh: a lost machine costs time, and not the result."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs.conftest import OWN

SCRIPT = Path(__file__).parents[1] / "scripts" / "elastic.sh"
LOST = """

class Lost(Net):
    '''Ends its machine, torchrun's agent and its process, in the second epoch.'''

    def on_train_batch_start(self, batch, batch_idx):
        if os.environ.get("IS_LOST") and (self.current_epoch, batch_idx) == (1, 2):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""
RUN = (
    *("--model=own_run.Lost", "--data=own_run.Shuffled", "--trainer.max_epochs=3"),
    *("--trainer.accelerator=cpu", "--output.curve=false"),
)
REPLICAS = ("--trainer.strategy=manual_allreduce", "--trainer.strategy.replicas=4")


def fingerprint(out: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith("fingerprint: "))
    return line


@pytest.mark.weekly
@pytest.mark.timeout(280)
def test_a_lost_machine_changes_no_bit(
    command: Any,
    tmp_path: Path,
    main: Callable[..., int],
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_run.py").write_text(OWN + LOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def start(is_host: bool, **env: str) -> Any:
        machines = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3")
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
        conf = f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=2,keep_alive_interval=1"
        launcher = ("-m", "torch.distributed.run", *machines, *meeting, conf)
        script = ("--no-python", "bash", str(SCRIPT), "run")
        return command.start(*script, *RUN, *REPLICAS, launcher=launcher, PATH=path, **env)

    kept, lost = start(True), start(False, IS_LOST="1")
    assert command.finish(lost, timeout=120)[0] == -9
    code, out, err = command.finish(kept, timeout=120)
    assert code == 0, err
    # both machines trained the first epoch; the others were trained by one
    assert "on 2 x cpu" in out and "epoch 2/3" not in out.partition("on cpu")[0]

    monkeypatch.syspath_prepend(tmp_path)
    assert main("fit", *RUN, *REPLICAS, "--trainer.devices=1", "--run_dir=whole") == 0
    assert fingerprint(out) == fingerprint(capfd.readouterr().out)
