"""What an offline run records is read back from its file; nothing asks, waits or goes online by itself."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from lightning_mgpu.tracking import weights_and_biases
from lightning_mgpu.tracking.weights_and_biases import choose_mode

FIT = ("--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--data.val_size=101", "--run_dir=run")
BLOCK = 32 * 1024


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format after a header of seven bytes."""
    content, position, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:  # no room for a record's header: padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def recorded(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Configuration, history and the run's own record."""
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    config: dict[str, Any] = {}
    history, run = [], None
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        updates = {"run": record.run.config.update, "config": record.config.update}.get(kind, [])
        config.update({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates})
        if kind == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return config, history, run


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nobody is logged in, and W&B's own settings are read anew."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path.parent / f"{tmp_path.name}_wandb"))
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.slow
def test_an_offline_run_records_everything(
    root: Path, main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    start = time.monotonic()
    assert main("fit", f"--data.root={root}", *FIT, "--wandb.project=p", "--wandb.tags=[a, b]") == 0
    wandb.finish()
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "wandb" in line and "offline" in line]
    assert "offline (no login); upload it with: wandb sync" in line
    assert time.monotonic() - start < 60
    config, history, run = recorded(tmp_path / "run")
    assert run.project == "p" and list(run.tags) == ["a", "b"] and run.display_name == "run" and run.job_type == "fit"
    assert config["model"]["class_path"] == "lightning_mgpu.models.LeNet"
    assert config["trainer"]["max_epochs"] == 2 and config["data"]["init_args"]["batch_size"] == 256
    assert config["num_parameters"] == 129_068 and config["global_batch_size"] == 256
    names = set().union(*history)
    wanted = {"train_loss", "train_acc", "val_loss", "val_acc", "test_acc", "epoch_seconds", "samples_per_sec"}
    assert wanted <= names
    assert sum("epoch_seconds" in row for row in history) == 2
    assert {"images/separated"} == {row["curve._type"] for row in history if "curve._type" in row}
    run_files = {path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*/files/*")}
    assert {"resolved_config.yaml", "resolved_model.txt"} <= run_files
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/files/media/images/curve*.png"))


def test_no_wandb_leaves_nothing(root: Path, main: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main("fit", f"--data.root={root}", *FIT, "--no-wandb") == 0
    assert not list(tmp_path.rglob("*wandb*"))
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.yaml", "metrics.csv", "curve.png"}
    assert "off (--wandb.mode=disabled)" in capsys.readouterr().out


def test_without_login_runs_are_offline() -> None:
    assert choose_mode("auto") == ("offline", "no login")


def test_unreachable_server_means_offline_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    start = time.monotonic()
    mode, reason = choose_mode("auto")
    assert mode == "offline" and reason.startswith("127.0.0.1 cannot be reached: ")
    assert time.monotonic() - start < 2 * weights_and_biases.REACH_SECONDS


@pytest.mark.parametrize(
    ("value", "mode"), [("dryrun", "offline"), ("offline", "offline"), ("disabled", "disabled"), ("online", "online")]
)
def test_environment_goes_before_auto(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", value)
    assert choose_mode("auto") == (mode, f"WANDB_MODE={mode}")
    assert choose_mode("disabled") == ("disabled", "--wandb.mode=disabled")


def test_netrc_is_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert weights_and_biases._is_logged_in("api.wandb.ai")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert not weights_and_biases._is_logged_in("api.wandb.ai")
