"""The records of a run: CSV files, several loggers, its W&B run, and no secret."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import wandb

from lightning_mgpu.runs import wandb_run
from lightning_mgpu.runs.wandb_run import WandbOptions, choose_mode
from tests.runs.conftest import metrics

ONE = ("--trainer.devices=1", "--trainer.max_epochs=1")


def test_loggers_add_to_each_other_and_share_the_run_directory(
    fit: Callable[..., int], tmp_path: Path, run_files: set[str]
) -> None:
    for option in ("--trainer.logger", "--trainer.logger+"):
        assert fit(*ONE, f"{option}=CSVLogger", f"--run_dir={option[2:]}") == 0
        run = tmp_path / option[2:]
        assert {path.name for path in run.iterdir()} == {*run_files, "lightning_logs"}
        assert (
            len(metrics(run)) > 3
            and (run / "lightning_logs" / "version_0" / "metrics.csv").exists()
        )
    assert fit(*ONE, "--trainer.logger=false", "--run_dir=none") == 0
    assert (
        not (tmp_path / "none" / "metrics.csv").exists()
        and (tmp_path / "none" / "config.yaml").exists()
    )


LOOKS = """
from lightning.pytorch import Callback

class Looks(Callback):
    def __len__(self):
        return 0  # falsy, but a callback

    def setup(self, trainer, pl_module, stage):
        if stage == "fit":
            print("loggers", [type(logger).__name__ for logger in trainer.loggers])
"""


def test_callbacks_find_the_loggers_when_they_are_set_up(
    fit: Callable[..., int], own: Path, capfd: Any
) -> None:
    (own / "own_looks.py").write_text(LOOKS)
    assert fit(*ONE, "--trainer.callbacks=own_looks.Looks") == 0
    assert "loggers ['RunCSVLogger']\n" in capfd.readouterr().out


def test_what_wandb_gets(
    fit: Callable[..., int], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings by their names on the command line, metrics, the learning rate, the fingerprint."""
    run = MagicMock(offline=True, id="abc", dir=str(tmp_path / "run"), summary={})
    run.settings.sync_dir = str(tmp_path / "run" / "wandb" / "offline-run-1")

    def start(**_: Any) -> MagicMock:
        (tmp_path / "run" / "wandb").mkdir(exist_ok=True)
        return run

    monkeypatch.setattr(wandb, "init", init := MagicMock(side_effect=start))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb.WandbLogger.log_image", lambda *args: None)
    assert fit(*ONE, "--wandb.mode=offline", "--wandb.project=fashion", "--run_dir=run") == 0
    out = capfd.readouterr().out
    told = "wandb:    offline (--wandb.mode=offline); upload it with: wandb sync run/wandb/"
    assert f"{told}offline-run-*" in out
    given = init.call_args.kwargs
    config = given["config"]
    assert config["model"] == "own_run.Net" and config["model.optimizer.lr"] == 0.1
    assert not [name for name in config if "init_args" in name or "class_path" in name]
    assert given["project"] == "fashion" and given["name"] == "run" and given["resume"] == "allow"
    assert {"val_acc", "train_loss", "lr-SGD"} <= {
        name for call in run.log.call_args_list for name in call.args[0]
    }
    assert run.summary["fingerprint"] == out.splitlines()[-2].split(": ")[1] and run.finish.called
    assert (tmp_path / "run" / "wandb" / "run_id").read_text() == "abc"
    assert fit("--resume=run", "--trainer.max_epochs=2") == 0
    assert init.call_args.kwargs["id"] == "abc"  # the same run goes on


def test_a_real_offline_run(
    fit: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints are its artifacts, which `wandb sync` uploads."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    assert fit(*ONE, "--run_dir=run", "--wandb.log_model=true") == 0
    wandb.teardown()  # all is written
    (records,) = tmp_path.rglob("offline-run-*/run-*.wandb")
    assert b"model-" in records.read_bytes() and b"best" in records.read_bytes()


def test_where_wandb_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb.teardown()  # it has read its variables
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert choose_mode("auto") == ("offline", "no login") == choose_mode("online")
    assert choose_mode("disabled") == ("disabled", "--wandb.mode=disabled")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert choose_mode("auto") == (
        "offline",
        "http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused",
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode("auto") == ("offline", "WANDB_MODE=offline")

    def fails(*args: Any) -> None:
        raise RuntimeError("the service\nis gone")

    monkeypatch.setattr(wandb_run, "choose_mode", fails)
    assert wandb_run.start_run(WandbOptions(), tmp_path, {}) == (
        None,
        "off (RuntimeError: the service is gone)",
    )
