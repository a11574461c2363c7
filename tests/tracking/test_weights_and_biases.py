"""What an offline run records is read back from its file; an online one waits for no server, and loses nothing."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from lightning_mgpu.tracking import Tracking, finish, saved_run_id, start_run
from lightning_mgpu.tracking import weights_and_biases as module
from lightning_mgpu.tracking.weights_and_biases import RUN_ID

FIT = ("--trainer.accelerator=cpu", "--data.val_size=101", "--run_dir=run")
ABOUT = ("--wandb.project=p", "--wandb.tags=[a, b]", "--wandb.notes=hello", "--wandb.group=g")


@pytest.fixture
def offline(root: Path, main: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run the command line; what its W&B run recorded."""
    monkeypatch.delenv("WANDB_MODE")

    def run(*args: str) -> Path:
        assert main(args[0], f"--data.root={root}", *FIT, *args[1:]) == 0
        wandb.teardown()  # writes what is still in memory
        return tmp_path / "run"

    return run


@pytest.mark.slow
def test_an_offline_run_records_everything(
    offline: Callable, recorded: Callable, confusions: Callable, capsys: pytest.CaptureFixture
) -> None:
    watch = ("--wandb.watch=all", "--wandb.watch_freq=2", "--wandb.log_model=true")
    run_dir = offline("fit", "--trainer.max_epochs=2", "--data.batch_size=128", *ABOUT, *watch)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line and "offline" in line]
    assert "offline (no login); upload it with: wandb sync run/wandb/offline-run-" in line
    assert line.endswith("; --wandb.log_model uploads nothing then, the checkpoints stay in the run directory")
    config, history, run = recorded(run_dir)
    assert (run.project, list(run.tags), run.notes, run.run_group) == ("p", ["a", "b"], "hello", "g")
    assert (run.display_name, run.job_type, run.run_id) == ("run", "fit", saved_run_id(run_dir))

    assert not [key for key, value in config.items() if value and isinstance(value, dict) and key[:6] != "_wandb"]
    assert config["model.class_path"] == "lightning_mgpu.models.LeNet" and config["trainer.max_epochs"] == 2
    assert config["model.init_args.optimizer.init_args.lr"] == 0.2 and config["data.init_args.batch_size"] == 128
    assert config["num_parameters"] == 129_068 and config["global_batch_size"] == 128
    facts = yaml.safe_load((run_dir / "hparams.yaml").read_text())
    assert {"git_commit", "git_dirty"} <= facts.keys()
    assert {name: config[name] for name in facts} == facts
    (files,) = (run_dir / "wandb").glob("offline-run-*/files")
    assert (files / "resolved_config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    assert (files / "resolved_model.txt").exists()

    names = set().union(*history)
    wanted = {"train_loss", "train_acc", "val_loss", "val_acc", "test_acc", "epoch_seconds", "samples_per_sec"}
    assert wanted <= names
    assert sum("epoch_seconds" in row for row in history) == 2
    watched = [row for row in history if "gradients/net.0.weight._type" in row]
    assert [row["trainer/global_step"] for row in watched] == [0, 2, 4, 6]  # of 8 steps
    assert watched[0]["gradients/net.0.weight._type"] == "histogram"
    assert sum(name.startswith("parameters/") and name.endswith("._type") for name in watched[0]) == 8
    assert {row["curve._type"] for row in history if "curve._type" in row} == {"images/separated"}
    (table,) = [row for row in history if "predictions_table._type" in row]
    assert table["predictions_table._type"] == "table-file" and table["predictions_table.nrows"] == 100
    assert sum(confusions(run_dir).values()) == 107


@pytest.mark.slow
def test_job_type_and_name_can_be_said(offline: Callable, recorded: Callable) -> None:
    run_dir = offline("test", "--wandb.job_type=nightly", "--wandb.name=mine", "--wandb.mode=offline")
    _, _, run = recorded(run_dir)
    assert (run.display_name, run.job_type) == ("mine", "nightly")


ONE_EPOCH = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=3", "--trainer.precision=64-true")
WATCH = ("--wandb.watch=gradients", "--wandb.watch_freq=1")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "manual_allreduce"])
def test_one_run_and_every_sample_once(
    strategy: str, offline: Callable, recorded: Callable, confusions: Callable, tmp_path: Path
) -> None:
    """All strategies see the same, reduced gradients, and the same test images, as one device."""
    seen = []
    for name, devices in (("auto", 1), (strategy, 3)):
        run_dir = offline("fit", *ONE_EPOCH, f"--trainer.strategy={name}", f"--trainer.devices={devices}", *WATCH)
        _, history, _ = recorded(run_dir)
        edges = [row["gradients/net.0.weight.bins"] for row in history if "gradients/net.0.weight.bins" in row]
        seen.append((edges, confusions(run_dir)))
        run_dir.rename(tmp_path / name)
    (expected_edges, expected_counts), (edges, counts) = seen
    assert len(edges) == len(expected_edges) == 2 and sum(counts.values()) == 107  # 402 training images are two batches
    assert counts == expected_counts
    for ours, theirs in zip(edges, expected_edges):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_no_wandb_leaves_nothing(root: Path, main: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main("fit", f"--data.root={root}", *FIT, "--trainer.max_epochs=1", "--no-wandb") == 0
    assert not list(tmp_path.rglob("*wandb*"))
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.yaml", "metrics.csv", "curve.png"}
    assert "off (--wandb.mode=disabled)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"watch_freq": 0}, r"--wandb\.watch_freq=0: take a number of optimizer steps from 1"),
        ({"finish_timeout": 0}, r"--wandb\.finish_timeout=0: take a number of seconds above 0"),
    ],
)
def test_wrong_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tracking(**arguments)


def test_wandb_need_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mgpu.tracking.weights_and_biases.is_installed", lambda: False)
    assert start_run(Tracking(), tmp_path, "fit", {}) == (None, "off (not installed: pip install wandb)")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"--wandb\.mode=offline: wandb is not installed: pip install wandb"):
        Tracking(mode="offline")


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
@pytest.mark.parametrize("url", ["localhost:8080", "foo"])
def test_a_server_whose_address_is_none_stops_no_run(
    url: str, mode: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    wandb.teardown()
    run, where = start_run(Tracking(mode=mode), tmp_path, "fit", {})
    assert run is None and where.startswith("off (ValidationError: ") and f"input_value='{url}'" in where
    assert "\n" not in where and key not in where
    monkeypatch.delenv("WANDB_BASE_URL")


class TestOnline:
    """`start_run` and `finish` alone, on servers that misbehave while a run logs."""

    @pytest.fixture
    def start(self, server: Any, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        wandb.teardown()
        (tmp_path / "my run").mkdir()  # with a space: the printed commands have to quote it
        return lambda **about: start_run(Tracking(**about), tmp_path / "my run", "fit", {"trainer": {"max_epochs": 3}})

    @staticmethod
    def sync(line: str, server: Any, key: str, cwd: Path) -> None:
        """Do what the line says, in a terminal of its own."""
        command = line.partition("with: ")[2].strip()
        assert command.startswith("wandb sync ")
        env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": key, "HOME": str(cwd)}
        command = f"{shlex.quote(sys.executable)} -m {command}"
        subprocess.run(command, shell=True, cwd=cwd, env=env, check=True, timeout=60)

    @pytest.mark.slow
    def test_a_good_server_gets_everything(self, start: Callable, server: Any, tmp_path: Path) -> None:
        run, where = start(name="n", tags=["t"], job_type="j", project="p")
        assert where == f"online, {server.url}/someone/p/runs/{run.id}"
        run.log({"x": 1, "trainer/global_step": 5})
        finish(run)
        said = server.runs[run.id]
        assert (said["displayName"], said["tags"], said["jobType"]) == ("n", ["t"], "j")
        assert server.config(run.id) == {"trainer.max_epochs": 3}
        assert [row["x"] for row in server.history[run.id]] == [1] and server.exited == {run.id: 0}

        again, _ = start()  # the same run directory: the same run goes on
        assert again.id == run.id == (tmp_path / "my run" / RUN_ID).read_text().strip()
        again.log({"x": 2})
        finish(again)
        assert [(row["_step"], row["x"]) for row in server.history[run.id]] == [(0, 1), (1, 2)]

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["401", "hang at the start of a run"])
    def test_a_run_the_server_does_not_start_goes_offline(
        self, how: str, start: Callable, server: Any, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "INIT_SECONDS", 1.0)
        server.behave = how
        begun = time.monotonic()
        run, where = start()
        assert where.startswith("offline (CommError: ") and run.offline and key not in where
        assert time.monotonic() - begun < 1 + 20

    @pytest.mark.slow
    def test_a_service_that_does_not_end_is_left(
        self, start: Callable, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Seen once, with a server that refuses the run, on a machine under load."""
        monkeypatch.setattr(module, "TEARDOWN_SECONDS", 0.5)
        server.behave = "401"
        begun = time.monotonic()
        with monkeypatch.context() as stuck:
            never = threading.Event()
            stuck.setattr("wandb.sdk.lib.service.service_process.ServiceProcess.join", lambda self: never.wait())
            run, where = start()
        assert where.startswith("offline (CommError: ") and time.monotonic() - begun < 0.5 + 20
        run.log({"x": 1})
        finish(run)
        never.set()

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["refuse", "hang", "500", "401"])
    def test_a_server_that_dies_holds_nothing_up(
        self,
        how: str,
        start: Callable,
        server: Any,
        servers: Callable,
        key: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        run, where = start(finish_timeout=2.0)
        assert where.startswith("online, ")
        run.log({"x": 0})
        if how == "refuse":
            server.stop()
        else:
            server.behave = how
        begun = time.monotonic()
        for i in range(1, 500):
            run.log({"x": i})
        assert time.monotonic() - begun < 10
        begun = time.monotonic()
        finish(run)
        assert time.monotonic() - begun < 2 + 20
        out, err = capfd.readouterr()
        (line,) = out.splitlines()
        assert line.startswith("wandb: ") and key not in out + err
        with servers() as good:
            self.sync(line, good, key, tmp_path)
            assert [row["x"] for row in good.history[run.id]] == list(range(500))

    @pytest.mark.slow
    def test_its_own_variables_count_where_nothing_is_said(
        self, start: Callable, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = {"RUN_ID": "agents", "PROJECT": "p", "NAME": "n", "RUN_GROUP": "g", "JOB_TYPE": "j", "TAGS": "t,u"}
        for name, value in said.items():  # RUN_ID as `wandb agent` does
            monkeypatch.setenv(f"WANDB_{name}", value)
        run, where = start(name="mine")
        assert where == f"online, {server.url}/someone/p/runs/agents" and run.name == "mine"
        finish(run)
        run = server.runs["agents"]
        assert (run["groupName"], run["jobType"], run["tags"]) == ("g", "j", ["t", "u"])

    @pytest.mark.slow
    def test_two_offline_parts_become_one_run(
        self, start: Callable, server: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for part in (0, 1):
            run, where = start(mode="offline")
            run.log({"x": part})
            finish(run)
            time.sleep(1.1)  # their directories are named by the second
        monkeypatch.delenv("WANDB_MODE", raising=False)
        self.sync(where, server, key, tmp_path)
        assert [(row["_step"], row["x"]) for row in server.history[run.id]] == [(0, 0), (1, 1)]
