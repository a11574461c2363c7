"""The same through real processes: nothing hangs, nothing is left half-written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
FIT = "python -m lightning_mgpu fit --trainer.accelerator=cpu --data.source=synthetic --trainer.max_epochs=1"
LIMITS = " ".join(f"--trainer.limit_{stage}_batches=1" for stage in ("train", "val", "test"))
WRONG = {
    "a run directory that is a file": (f"touch x; {FIT} --run_dir=x", "--run_dir=x exists"),
    "a run directory nobody can make": (f"{FIT} --run_dir=/proc/x", "the run directory /proc/x cannot be made"),
    "a disk that is full": (f"ulimit -f 64; {FIT} {LIMITS}", "File too large"),
    "two machines, and nobody said where": (f"{FIT} {LIMITS} --trainer.num_nodes=2", "--trainer.num_nodes=2"),
    "a pipe for a configuration": (f"mkfifo p; {FIT} --config p", "no such file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_ends_in_one_line(case: str, tmp_path: Path) -> None:
    line, said = WRONG[case]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "disabled"}
    for name in ("PL_GLOBAL_SEED", "LIGHTNING_MGPU_RUN_DIR", "MASTER_ADDR", "NODE_RANK", "GROUP_RANK"):
        env.pop(name, None)
    command = line.replace("python", sys.executable)
    result = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    quiet = ("warning: ", "Could not save font_manager cache")  # matplotlib's, where it has none yet
    errors = [line for line in result.stderr.splitlines() if not line.startswith(quiet)]
    assert result.returncode == 2 and len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ") and said in errors[0]
    assert not list(tmp_path.glob("runs/*/checkpoints/*.ckpt"))
