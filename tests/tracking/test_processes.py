"""The real command line beside a W&B server: one run a job, no secret anywhere, nothing held up. Slow."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CPU = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--run_dir=run")
SMALL = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=2")


def holders(directory: Path, *secrets: str) -> list[str]:
    """The files that hold one of the secrets."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [f"{path}: {s}" for path in files for s in secrets if s.encode() in path.read_bytes()]


def test_an_online_run_uploads_everything_but_secrets(command: Any, server: Any, key: str, tmp_path: Path) -> None:
    del command.env["WANDB_MODE"]
    command.env.update(WANDB_BASE_URL=server.url, WANDB_API_KEY=key, HF_TOKEN="hf_in_the_environment")
    command.env["MY_SECRET"] = 'in-"quotes"'  # which JSON escapes
    (tmp_path / ".netrc").write_text("machine elsewhere login me password in-the-netrc\n")
    (tmp_path / ".netrc").chmod(0o600)
    url = '--data.root=https://me:hunter2@host/data?token=sesame&x=in-"quotes"'
    code, out, err = command(
        "fit", *CPU, *SMALL, url, "--wandb.log_model=true", "--wandb.notes=by hf_in_the_environment"
    )
    assert code == 0, err
    (run_id,) = server.runs
    assert f"wandb:    online, {server.url}/someone/lightning-mgpu/runs/{run_id}\n" in out
    assert server.runs[run_id]["jobType"] == "fit" and server.exited == {run_id: 0}
    config = server.config(run_id)
    assert config["data.init_args.root"] == "https://***@host/data?token=***&x=***" and "git_commit" in config
    history = server.history[run_id]
    assert any("train_loss" in row for row in history) and any("test_acc" in row for row in history)
    assert {"resolved_config.yaml", "resolved_model.txt"} <= server.files.keys()
    (artifact,) = [artifact for artifact in server.artifacts if artifact["artifactTypeName"] == "model"]
    assert f"model-{run_id}" in repr(artifact)
    (best,) = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name != "last.ckpt"]
    assert server.files["artifact/model.ckpt"] == best.read_bytes()

    secrets = (key, "hf_in_the_environment", "in-the-netrc", 'in-"quotes"', "hunter2", "sesame")
    (tmp_path / ".netrc").unlink()
    assert holders(tmp_path, *secrets) == []  # the run directory, W&B's own logs, and what it keeps in HOME
    assert not [secret for secret in secrets if secret in out + err]
    uploaded = repr((server.runs, server.history, server.artifacts, server.files)).encode()
    assert not [secret for secret in secrets if secret.encode() in uploaded]


@pytest.mark.parametrize("launcher", ["ddp", "torchrun"])
def test_one_run_of_two_processes(command: Any, launcher: str, confusions: Callable, tmp_path: Path) -> None:
    command.env["WANDB_MODE"] = "offline"
    args = ("fit", *CPU, *SMALL, "--trainer.devices=2", "--data.batch_size=127")
    if launcher == "torchrun":
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_mgpu")
        process = command.start(*args, launcher=torchrun)
        code, out, err = command.finish(process, timeout=120)
    else:
        code, out, err = command(*args)
    assert code == 0, err
    assert out.count("wandb:    offline (WANDB_MODE=offline)") == 1
    assert len(list(tmp_path.rglob("*.wandb"))) == 1
    counts = confusions(tmp_path / "run")
    assert sum(counts.values()) == 10_000  # 79 batches of 127: the last one is uneven


def test_a_server_that_dies_does_not_slow_training(command: Any, server: Any, key: str, tmp_path: Path) -> None:
    del command.env["WANDB_MODE"]
    command.env.update(WANDB_BASE_URL=server.url, WANDB_API_KEY=key)
    args = ("--trainer.max_epochs=6", "--trainer.limit_train_batches=40", "--trainer.limit_val_batches=2")
    process = command.start("fit", *CPU, *args, "--trainer.limit_test_batches=2", "--wandb.finish_timeout=3")
    while (line := process.stdout.readline()) and not line.startswith("epoch 3/"):
        pass
    server.behave = "hang"
    code, out, err = command.finish(process, timeout=120)
    assert code == 0, err
    assert (
        "the server did not take everything within 3 s" in out and "wandb sync --include-online run/wandb/run-" in out
    )
    rows = csv.DictReader((tmp_path / "run" / "metrics.csv").open())
    seconds = [float(row["epoch_seconds"]) for row in rows if row["epoch_seconds"]]
    assert len(seconds) == 6 and min(seconds[3:]) < 3 * min(seconds[:3])


@pytest.mark.parametrize("mode", ["auto", "disabled"])
def test_wandb_is_imported_only_where_it_is_used(command: Any, mode: str, tmp_path: Path) -> None:
    """A finder that knows no wandb is as good as an environment without it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        "find = importlib.machinery.PathFinder.find_spec\n"
        "def without(name, path=None, target=None):\n"
        "    return None if name.split('.')[0] == 'wandb' else find(name, path, target)\n"
        "importlib.machinery.PathFinder.find_spec = staticmethod(without)\n"
    )
    command.env["PYTHONPATH"] = f"{tmp_path}:{command.env['PYTHONPATH']}"
    del command.env["WANDB_MODE"]
    start = time.monotonic()
    code, out, err = command("fit", *CPU, *SMALL, "--trainer.limit_test_batches=2", f"--wandb.mode={mode}")
    assert code == 0 and "Traceback" not in err, err
    reason = "not installed: pip install wandb" if mode == "auto" else "--wandb.mode=disabled"
    assert f"wandb:    off ({reason})\n" in out and time.monotonic() - start < 60
    code, _, err = command("fit", *CPU[:2], "--run_dir=other", *SMALL, "--wandb.mode=online")
    assert code == 2 and "wandb.mode=online: wandb is not installed" in err and not (tmp_path / "other").exists()
