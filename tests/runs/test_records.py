"""The records of a run: run.json, metrics.csv, several loggers, its W&B run."""

import json
from unittest.mock import MagicMock, call

import pytest
import wandb

from lightning_mgpu.runs.directory import config_beside
from lightning_mgpu.runs.metrics import summarize
from lightning_mgpu.runs.wandb_run import WandbOptions, start_run
from tests.runs.conftest import metrics

ONE = "--trainer.max_epochs=1"


def test_run_json(run):
    record = json.loads((run / "run.json").read_text())
    assert record["command"].startswith("python -m lightning_mgpu fit --model=own_run.Net ")
    assert record["options"]["data.batch_size"] == "64" and record["seed"] == 42
    assert record["num_parameters"] == 12_730 and record["strategy"] == "SingleDeviceStrategy"
    assert set(record["versions"]) == {"torch", "lightning", "torchmetrics"}
    end = record["end"]
    assert end["state"] == "finished" and end["epochs"] == 2 and len(end["fingerprint"]) == 12
    assert end["best"]["monitor"] == "val_acc" and end["best"]["epoch"] in (1, 2)
    assert end["metrics"] == summarize(run, end["best"]["epoch"])
    assert {"val_acc", "test_acc", "seconds_per_epoch"} < end["metrics"].keys()


def test_loggers_add_to_each_other(fit, tmp_path, capfd):
    """Or none logs. No test is announced where none is made."""
    logger = ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=more")
    assert fit(ONE, *logger, "--run_dir=a") == 0
    assert len(metrics(tmp_path / "a")) > 3
    assert (tmp_path / "more" / "lightning_logs" / "version_0" / "metrics.csv").exists()
    capfd.readouterr()
    none = ("--trainer.logger=false", "--trainer.limit_test_batches=0", "--run_dir=none")
    assert fit(ONE, *none) == 0
    assert "testing" not in capfd.readouterr().out
    assert {"config.yaml", "checkpoints"} <= {each.name for each in (tmp_path / "none").iterdir()}
    assert not (tmp_path / "none" / "metrics.csv").exists()


@pytest.fixture
def init(own, monkeypatch):
    """In the place of `wandb.init`."""
    run = MagicMock(offline=True, id="abc", dir=str(own / "run"), summary={})
    monkeypatch.setattr(wandb, "init", init := MagicMock(return_value=run))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb.WandbLogger.log_image", lambda *args: None)
    return init


def test_what_wandb_gets(fit, capfd, init):
    """Settings by their names on the command line, metrics, the learning rate."""
    run = init.return_value
    assert fit(ONE, "--wandb.mode=offline", "--wandb.project=fashion", "--run_dir=run") == 0
    out = capfd.readouterr().out
    assert "wandb:    offline (--wandb.mode=offline); wandb sync run/wandb/offline-run-*" in out
    given = init.call_args.kwargs
    assert given["config"]["model"] == "own_run.Net" and given["config"]["model.lr"] == 0.1
    assert given["project"] == "fashion" and given["name"] == "run" and given["resume"] == "allow"
    logged = {name for call in run.log.call_args_list for name in call.args[0]}
    assert {"val_acc", "train_loss", "lr-SGD"} <= logged
    assert run.finish.called
    assert fit("--resume=run", "--trainer.max_epochs=2", "--wandb.mode=offline") == 0
    assert init.call_args.kwargs["id"] == "abc"  # the same run goes on


LOGS = """
import os
from lightning_mgpu.models import LeNet

class Logs(LeNet):
    def on_test_epoch_end(self):
        super().on_test_epoch_end()
        os.write(1, " ".join(["", *(type(each).__name__ for each in self.loggers), "\\n"]).encode())
        self.logger.experiment.log({"mine": 3})
        self.logger.experiment.config.update(dict(self.logger.experiment.config))
        self.logger.log_metrics({"own": 1.0})
"""


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_lines_of_everybodys_pages(mode, fit, own, init, capfd):
    """`self.logger` is W&B's; where that is off they do nothing. All checkpoints are in the run.

    Those of a callback are apart, with a `last.ckpt` of their own.
    """
    (own / "own_logs.py").write_text(LOGS)
    own_callback = ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_last=true")
    options = ("--model=own_logs.Logs", *own_callback, "--run_dir=run")
    assert fit(ONE, *options, f"--wandb.mode={mode}") == 0
    logged = init.return_value.log.call_args_list
    assert (call({"mine": 3}) in logged) == (mode == "offline")
    assert ("own" in metrics(own / "run")[-1]) == (mode == "disabled")
    files = [path.parent for path in own.rglob("*.ckpt")]
    assert files.count(own / "run" / "checkpoints") == len(files) - 2 == 2
    last = own / "run" / "own_checkpoints" / "last.ckpt"
    assert last.exists() and config_beside(last) == own / "run" / "config.yaml"
    assert fit("--model=own_logs.Logs", "--trainer.fast_dev_run=true") == 0
    assert "testing the last epoch: no checkpoint is saved" in capfd.readouterr().out


def test_where_wandb_records(monkeypatch, tmp_path):
    """Offline without a login or an answering server; off if it cannot start at all."""

    def where(mode="auto"):
        logger, text = start_run(WandbOptions(mode), tmp_path, None, {})
        if logger is not None:
            logger.experiment.finish()
        return text

    wandb.teardown()  # it has read its variables
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert where() == f"offline (no login); wandb sync {tmp_path}/wandb/offline-run-*"
    assert where("disabled") == "off (--wandb.mode=disabled)"
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "onlin")
    assert where() == "off (WANDB_MODE=onlin)"
    assert where("offline").startswith("off (ValidationError: ")
    monkeypatch.setattr(wandb, "init", MagicMock(side_effect=RuntimeError("the service\nis gone")))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert where() == "off (RuntimeError: the service is gone)"
