"""Several machines: two nodes on loopback, started by torchrun, by hand and by a SLURM that is acted. Slow."""

import csv
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_mgpu.arguments import CONFIGS
from lightning_mgpu.clusters import follow_launcher
from lightning_mgpu.errors import UsageError
from lightning_mgpu.run_dir import RUN_DIR, RunDir
from lightning_mgpu.slurm import job_name, requeue, with_requeued_job

CPU = ("--data.source=synthetic", "--trainer.accelerator=cpu")
BRIEF = (
    *(*CPU, "--trainer.precision=64-true", "--data.batch_size=96", "--data.val_size=503", "--trainer.max_epochs=1"),
    *("--trainer.limit_train_batches=12", "--trainer.limit_test_batches=2"),
)
SLURM = {
    **{"SLURM_JOB_ID": "4242", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
    **{"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1"},
}


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """The command line ignores Ctrl-C in other processes than the first, which a test may take itself for."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def by_torchrun(command: Any, *args: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    common = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1")
    common = (*common, "--master_port", port)
    launchers = [(*common, f"--node_rank={rank}", "-m", "lightning_mgpu") for rank in (0, 1)]
    return [command.start(*args, launcher=launcher) for launcher in launchers]


def by_hand(command: Any, *args: str) -> list[subprocess.Popen[str]]:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    two = ("--trainer.num_nodes=2", "--trainer.devices=1")
    return [command.start(*args, *two, **env, NODE_RANK=str(rank)) for rank in (0, 1)]


def by_srun(command: Any, *args: str, **env: str) -> list[subprocess.Popen[str]]:
    env = {**SLURM, "MASTER_PORT": str(free_port()), **env}
    return [command.start(*args, **env, SLURM_PROCID=str(rank), SLURM_NODEID=str(rank)) for rank in (0, 1)]


def finish(command: Any, nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [command.finish(node, timeout=240) for node in nodes]


def assert_all_end_well(results: list[tuple[int, str, str]]) -> None:
    """Fails with all that the processes have said: one of them once aborted, and nobody saw where."""
    if any(code for code, _, _ in results):
        pytest.fail("\n".join(f"rank {rank}: exit status {code}\n{err}" for rank, (code, _, err) in enumerate(results)))


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def metrics(run: Path) -> dict[str, float]:
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    return {name: float(row[name]) for row in rows for name in row if row[name] and name.endswith(("_loss", "_acc"))}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_what_one_device_does(command: Any, tmp_path: Path) -> None:
    code, _, err = command("fit", *BRIEF, "--trainer.devices=1", "--run_dir=one")
    assert code == 0, err
    one = parameters(tmp_path / "one")
    for launch in (by_torchrun, by_hand):
        (code, out, err), (code1, out1, err1) = finish(command, launch(command, "fit", *BRIEF))
        assert code == code1 == 0, err + err1
        assert "batch:    96 global, 48 per device\n" in out and out1 == ""
        (run,) = (tmp_path / "runs").iterdir()  # one, although both nodes look at the clock
        assert len(list(run.rglob("metrics.csv"))) == 1
        for name, value in parameters(run).items():
            assert (value - one[name]).norm() / one[name].norm() < 1e-10, f"{launch.__name__}: {name}"
        ours, theirs = metrics(run), metrics(tmp_path / "one")
        assert ours == pytest.approx(theirs, rel=1e-6) and {"val_acc", "test_acc"} < ours.keys()
        run.rename(tmp_path / launch.__name__)


LEAVING = """
import atexit, os
from pathlib import Path
import torch.distributed as dist
from lightning.pytorch import Callback

class Leaving(Callback):
    def on_fit_start(self, trainer, module):
        assert dist.is_initialized()
        here = Path(f"rank{trainer.global_rank}").absolute()
        atexit.register(lambda: here.write_text(f"in a group: {dist.is_initialized()}"))
"""


@pytest.mark.slow
def test_every_process_leaves_the_group(command: Any, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    code, _, err = command("fit", *BRIEF, "--trainer.devices=2", "--trainer.callbacks=leaving.Leaving")
    assert code == 0, err
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["in a group: False"] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slurm_job_is_queued_again_and_goes_on(command: Any, tmp_path: Path) -> None:
    fit = ("fit", *CPU, "--data.batch_size=64", "--data.val_size=101", "--trainer.limit_test_batches=2")
    fit = (*fit, "--trainer.max_epochs=2", "--trainer.limit_train_batches=150")
    results = finish(command, by_srun(command, *fit, SLURM_JOB_ID="1"))
    assert_all_end_well(results)

    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    nodes = by_srun(command, *fit, PATH=path)
    while (line := nodes[0].stdout.readline()) and not line.startswith("epoch 1/2"):  # type: ignore[union-attr]
        pass
    time.sleep(0.3)  # into the second epoch
    for node in nodes:
        node.send_signal(signal.SIGUSR1)
    (code, out, err), (code1, _, err1) = finish(command, nodes)
    assert code == code1 == 1 and "Traceback" not in err + err1, err + err1
    assert (tmp_path / "asked").read_text() == "requeue 4242\n"
    assert "SLURM job 4242 is queued again; go on with: " in out and out.endswith("fit --resume=runs/slurm_4242.0\n")
    saved = torch.load(tmp_path / "runs" / "slurm_4242.0" / "checkpoints" / "last.ckpt", weights_only=True)
    assert 150 <= saved["global_step"] < 300

    results = finish(command, by_srun(command, *fit, SLURM_RESTART_COUNT="1"))
    assert_all_end_well(results)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["slurm_1.0", "slurm_4242.0"]
    whole, again = parameters(tmp_path / "runs" / "slurm_1.0"), parameters(tmp_path / "runs" / "slurm_4242.0")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    rows = list(csv.DictReader((tmp_path / "runs" / "slurm_4242.0" / "metrics.csv").open()))
    assert [row["epoch"] for row in rows if row["val_acc"]] == ["0", "1"]


@pytest.mark.parametrize(
    ("args", "env", "parts"),
    [
        ("", {"NODE_RANK": "1"}, ["NODE_RANK=1, but --trainer.num_nodes=1"]),
        ("", {"NODE_RANK": "first"}, ["NODE_RANK=first in the environment: expected a whole number"]),
        ("--trainer.num_nodes=2", {"NODE_RANK": "0"}, ["--trainer.num_nodes=2 needs MASTER_ADDR, MASTER_PORT"]),
        ("--trainer.devices=2", {"WORLD_SIZE": "4"}, ["WORLD_SIZE=4, but --trainer.num_nodes=1", "make 2"]),
        ("", {"RANK": "1"}, ["RANK=1 without torchrun", "NODE_RANK"]),
        ("--trainer.strategy=manual_allreduce", SLURM, ["one process on one node", "use --trainer.strategy=ddp"]),
        ("--trainer.strategy=dp", SLURM, ["one process on one node", "use --trainer.strategy=ddp"]),
        ("--trainer.strategy=manual_allreduce --trainer.num_nodes=2", {}, ["needs NODE_RANK, MASTER_ADDR"]),
        ("--trainer.devices=3", SLURM, ["devices=3", "--ntasks-per-node=1"]),
    ],
)
@pytest.mark.filterwarnings("ignore:data.source=synthetic")
def test_contradiction_ends_in_one_line(
    args: str,
    env: dict[str, str],
    parts: list[str],
    main: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name, value in {**env, **({"SLURM_PROCID": "0", "SLURM_NODEID": "0"} if env is SLURM else {})}.items():
        monkeypatch.setenv(name, value)
    assert main("fit", *CPU, *args.split()) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("error: ") == 1 and not list(tmp_path.glob("runs"))
    assert all(part in err for part in parts), err


def test_a_job_that_was_not_saved_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["fit", "--trainer.max_epochs=2"]
    assert job_name() is None and with_requeued_job(args) is args
    for name, value in {**SLURM, "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    assert job_name() == "slurm_4242.0" and with_requeued_job(args) is args
    checkpoints = tmp_path / "runs" / "slurm_4242.0_2" / "checkpoints"  # made by the first restart
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").touch()
    assert with_requeued_job(args) is args  # no config.yaml: not a run
    (checkpoints.parent / "config.yaml").touch()
    shutil.copytree(checkpoints.parent, tmp_path / "runs" / "slurm_4242.01")  # another step's, and newer
    os.utime(tmp_path / "runs" / "slurm_4242.01" / "checkpoints" / "last.ckpt", (2e9, 2e9))
    assert with_requeued_job(args) == ["fit", "--resume=runs/slurm_4242.0_2"]
    assert with_requeued_job(["test"]) == ["test"]
    assert with_requeued_job(["fit", "--run_dir", "elsewhere"]) == ["fit", "--run_dir", "elsewhere"]
    elsewhere = tmp_path / "elsewhere" / "slurm_4242.0"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "last.ckpt").touch()
    (tmp_path / "root.yaml").write_text("trainer: {default_root_dir: elsewhere}\ncheckpoint: {dirpath: kept}\n")
    (tmp_path / "run.yaml").write_text("run_dir: runs/slurm_4242.0_2\ncheckpoint.dirpath: null\n")
    there, here = "--resume=elsewhere/slurm_4242.0", "--resume=runs/slurm_4242.0_2"
    for given, expected in (
        ("--config root.yaml", there),
        ("--config=root.yaml --config=experiment/lenet_book.yaml", there),  # shipped
        ("--config=root.yaml -c run.yaml", here),
        ("--trainer.default_root_dir=elsewhere --checkpoint.dirpath kept", there),
        ("--config=root.yaml --trainer.default_root_dir runs --checkpoint.dirpath=", here),
    ):
        assert with_requeued_job(["fit", *given.split()]) == ["fit", expected], given
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_name() == "slurm_77_3.0"
    monkeypatch.setenv("PATH", "")
    assert requeue().startswith("'scontrol requeue 77_3' failed: ")


@pytest.mark.parametrize(
    ("tasks", "strategy", "devices", "warns"),
    [
        ({"SLURM_NTASKS": "1"}, "manual_allreduce", "auto", False),
        ({"SLURM_NTASKS": "1"}, "auto", 1, True),
        ({"SLURM_NTASKS": "4"}, "ddp", 4, False),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, "ddp", 4, False),
        ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"}, "auto", 4, False),
    ],
)
def test_devices_are_as_many_as_slurms_tasks(
    tasks: dict[str, str],
    strategy: str,
    devices: int | str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Without `--ntasks-per-node` SLURM does not say how many there are on a machine."""
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", **tasks}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning_mgpu.clusters.num_devices", lambda config: 4)
    config = Namespace(accelerator="cpu", devices="auto", num_nodes=1, strategy=strategy)
    follow_launcher(config)
    assert (config.devices, config.num_nodes) == (devices, int(tasks.get("SLURM_NNODES", 1)))
    assert ["--ntasks-per-node=4" in str(warning.message) for warning in recwarn] == [True] * warns


def test_what_lightning_detects_itself_needs_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Namespace(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", plugins=None)
    with pytest.raises(UsageError, match="needs NODE_RANK, MASTER_ADDR, MASTER_PORT"):
        follow_launcher(config)
    with monkeypatch.context() as by_mpirun:
        by_mpirun.setattr(MPIEnvironment, "detect", staticmethod(lambda: True))
        follow_launcher(config)
    for name in ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"):
        monkeypatch.setenv(name, "1")
    follow_launcher(config)
    assert (config.devices, config.num_nodes) == (2, 2)


def test_commands_of_one_script_have_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `srun` they are all step 0."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**SLURM, "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID")
    names = []
    for args in (["fit", "--model=LeNet"], ["fit", "--model=ResNet18"]):
        monkeypatch.setattr("sys.orig_argv", ["python", "-m", "lightning_mgpu", *args])
        assert with_requeued_job(args) is args
        names.append(job_name())
        checkpoints = tmp_path / "runs" / names[-1] / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "last.ckpt").touch()
        (checkpoints.parent / "config.yaml").touch()
        assert with_requeued_job(args) == ["fit", f"--resume=runs/{names[-1]}"]
    assert names[0] != names[1]


def test_a_restart_takes_the_directory_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv(RUN_DIR, "")
    (run := tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.csv", ".hparams.yaml.part"):
        (run / name).touch()
    config = Namespace(run_dir=str(run))
    with pytest.raises(UsageError, match="exists and is not empty"):
        RunDir(config)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert RunDir(config).path == run
    assert sorted(path.name for path in run.iterdir()) == [".hparams.yaml.part", "config.yaml"]
    for theirs in ("notes.txt", "checkpoints/x.ckpt"):
        (run / theirs).parent.mkdir(exist_ok=True)
        (run / theirs).touch()
        with pytest.raises(UsageError, match="exists and is not empty"):
            RunDir(config)
        (run / theirs).unlink()


def test_fsdp_needs_gpus(main: Callable, capfd: pytest.CaptureFixture) -> None:
    strategy = yaml.safe_load((CONFIGS / "trainer" / "fsdp.yaml").read_text())["trainer"]["strategy"]
    assert strategy["class_path"].endswith(".FSDPStrategy")
    assert FSDPStrategy(**strategy["init_args"])._state_dict_type == "full"
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for args, wanted in ((), "no GPU is found here"), (("--trainer.accelerator=cpu",), "GPU"):
        assert main("fit", "--config=trainer/fsdp.yaml", *args) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and wanted in err
