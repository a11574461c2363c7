"""The real command line in processes of its own: ddp on CPU processes, checkpoints, Ctrl-C. Slow."""

import csv
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

CPU = ("--data.source=synthetic", "--trainer.accelerator=cpu")
BRIEF = ("--trainer.max_epochs=1", "--trainer.limit_val_batches=2", "--trainer.limit_test_batches=2")
OWN_DATA = """
import torch
from lightning.pytorch import LightningDataModule
from lightning_mgpu.models import Classifier
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Net(Classifier):
    def __init__(self):
        super().__init__(num_classes=3)
        self.net = torch.nn.Linear(1, 3)


class Data(LightningDataModule):
    def predict_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(83.0)[:, None], torch.arange(83)), batch_size=41)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(1), torch.tensor(0))] * 4)


class StreamData(LightningDataModule):
    def predict_dataloader(self):
        return DataLoader(Stream(), batch_size=2)
"""
LOUD = "warning: data.source=synthetic: training on made-up images; no accuracy below means anything.\n"


def parameters(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_ddp_on_two_processes(command: Any, tmp_path: Path, run_files: set[str]) -> None:
    args = (*CPU, *BRIEF, "--trainer.devices=2", "--trainer.limit_train_batches=20")
    code, out, err = command("fit", *args)
    assert code == 0, err
    assert err == LOUD
    lines = out.splitlines()
    assert [line.split(":")[0].split()[0] for line in lines] == [
        *("model", "strategy", "batch", "data", "run", "wandb", "epoch", "test")
    ]
    assert "DDPStrategy on [device(type='cpu'), device(type='cpu')]" in lines[1]
    assert "256 global, 128 per device" in lines[2]
    assert lines[-1].endswith("sec/epoch on [device(type='cpu'), device(type='cpu')]")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("_LeNet_auto_2")
    assert {path.name for path in run.iterdir()} == run_files
    (epoch,) = [row for row in csv.DictReader((run / "metrics.csv").open()) if row["epoch_seconds"]]
    assert float(epoch["samples_per_sec"]) == pytest.approx(20 * 256 / float(epoch["epoch_seconds"]), rel=0.2)


def test_fit_test_predict_and_resume_through_checkpoints(command: Any, tmp_path: Path) -> None:
    code, out, err = command(
        "fit", *CPU, *BRIEF, "--trainer.limit_train_batches=5", "--run_dir=fit", "--data.batch_size=64"
    )
    assert code == 0, err
    checkpoint = "fit/checkpoints/last.ckpt"
    tested = out.splitlines()[-1].split(",")[0]  # test acc: 0.10
    code, out, err = command("test", *CPU, *BRIEF, "--ckpt_path", checkpoint, "--run_dir=test", "--data.batch_size=64")
    assert code == 0 and "test_acc" in out, err
    (row,) = csv.DictReader((tmp_path / "test" / "metrics.csv").open())
    assert tested == f"test acc: {float(row['test_acc']):.2f}"
    for devices in (1, 3):  # 10,000 samples in batches of 250: shares of 84, 83, 83
        run = ("--ckpt_path", checkpoint, f"--run_dir=predict{devices}", f"--trainer.devices={devices}")
        code, out, err = command("predict", *CPU, *run, "--data.batch_size=251", "--trainer.limit_predict_batches=5")
        assert code == 0 and out.splitlines()[-1] == f"predictions: predict{devices}/predictions.csv", err
    alone, shared = (rows(tmp_path / f"predict{devices}" / "predictions.csv") for devices in (1, 3))
    assert len(alone) > 1200 and [row[:2] for row in alone] == [row[:2] for row in shared]
    assert [int(row[0]) for row in alone[1:]] == list(range(len(alone) - 1))
    for a, b in zip(alone[1:], shared[1:]):
        assert [float(p) for p in a[3:]] == pytest.approx([float(p) for p in b[3:]], abs=2e-6)
    longer = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=5", "--run_dir=resumed", "--data.batch_size=64")
    code, out, err = command("fit", *CPU, *BRIEF, *longer, "--ckpt_path", checkpoint)
    assert code == 0 and "epoch 2/2" in out and "epoch 1/" not in out, err


def test_predictions_of_a_loader_of_ones_own(command: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_DATA)
    args = ("predict", "--model=own.Net", CPU[1])
    for devices in (1, 2):  # Lightning deals the samples out one by one: 42 and 41, two batches and one
        run = (f"--trainer.devices={devices}", f"--run_dir=on{devices}")
        code, _, err = command(*args, "--data=own.Data", "--trainer.strategy=ddp", *run)
        assert code == 0, err
    alone, shared = (rows(tmp_path / f"on{devices}" / "predictions.csv") for devices in (1, 2))
    assert [row[:2] for row in shared[1:]] == [[str(i), str(i)] for i in range(83)]
    assert [row[:3] for row in shared] == [row[:3] for row in alone]
    code, _, err = command(*args, "--data=own.StreamData", "--trainer.strategy=ddp", *run[:1], "--run_dir=stream")
    assert code == 2 and err.count("error: ") == 1 and not (tmp_path / "stream").exists(), err
    assert "error: predict in 2 processes must know which samples are in a batch" in err


def test_ddp_equals_one_device_in_float64(command: Any, tmp_path: Path) -> None:
    args = (*CPU, *BRIEF, "--trainer.precision=64-true", "--data.batch_size=96", "--trainer.limit_train_batches=12")
    trained = {}
    for devices in (1, 2, 3):
        code, _, err = command("fit", *args, f"--trainer.devices={devices}", f"--run_dir=on{devices}")
        assert code == 0, err
        trained[devices] = parameters(tmp_path / f"on{devices}" / "checkpoints" / "last.ckpt")
    for devices in (2, 3):
        for name, value in trained[1].items():
            assert value.dtype == torch.float64
            error = (trained[devices][name] - value).norm() / value.norm()
            assert error < 1e-10, f"{name} on {devices} devices: {error}"
    logged = [list(csv.DictReader((tmp_path / f"on{devices}" / "metrics.csv").open())) for devices in (1, 2, 3)]
    for name in ("train_loss", "train_acc", "val_loss", "val_acc", "test_loss", "test_acc"):
        one, two, three = ([float(row[name]) for row in log if row.get(name)] for log in logged)
        assert one and one == pytest.approx(two, rel=1e-6) and one == pytest.approx(three, rel=1e-6)  # sums in float32


def test_strategies_on_two_devices_are_equal_to_the_last_bit(command: Any, tmp_path: Path) -> None:
    """In float32: two gradients have one sum, and every strategy computes them with the same number of threads."""
    args = (*CPU, *BRIEF, "--trainer.devices=2", "--trainer.limit_train_batches=8", "--model.optimizer.lr=1.0")
    command.env.pop("OMP_NUM_THREADS", None)  # each device its share of the cores
    trained = {}
    for strategy in ("ddp", "dp", "manual_allreduce"):
        code, _, err = command("fit", *args, f"--trainer.strategy={strategy}", f"--run_dir={strategy}")
        assert code == 0, err
        trained[strategy] = parameters(tmp_path / strategy / "checkpoints" / "last.ckpt")
    for strategy in ("dp", "manual_allreduce"):
        different = [name for name, value in trained["ddp"].items() if not torch.equal(trained[strategy][name], value)]
        assert not different, f"{strategy} and ddp differ in {different}"


@pytest.mark.parametrize("devices", [1, 2])
def test_resnet18_trains(command: Any, devices: int) -> None:
    small = (
        "--model=ResNet18",
        "--data.batch_size=4",
        "--trainer.limit_train_batches=2",
        f"--trainer.devices={devices}",
    )
    code, out, err = command("fit", *CPU, *BRIEF, *small)
    assert code == 0 and "ResNet18, 11,175,818 parameters" in out and "test acc: " in out.splitlines()[-1], err


def test_one_wandb_run_a_job(command: Any, tmp_path: Path) -> None:
    command.env["WANDB_MODE"] = "offline"
    run = ("--run_dir=run", "--trainer.limit_train_batches=2", "--trainer.devices=2")
    code, out, err = command("fit", *CPU, *BRIEF, *run)
    assert code == 0 and "offline (WANDB_MODE=offline)" in out, err
    assert len(list(tmp_path.rglob("offline-run-*/run-*.wandb"))) == 1


@pytest.mark.parametrize("login", [False, True])
def test_nobody_is_asked_and_nothing_waits(command: Any, login: bool) -> None:
    del command.env["WANDB_MODE"]
    if login:
        command.env.update({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"})
    start = time.monotonic()
    code, out, err = command("fit", *CPU, *BRIEF, "--trainer.limit_train_batches=2", timeout=60)
    assert code == 0 and err == LOUD
    reason = "127.0.0.1 cannot be reached: " if login else "no login"
    assert f"wandb:    offline ({reason}" in out
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_ends_cleanly(command: Any, devices: int) -> None:
    process = command.start("fit", *CPU, f"--trainer.devices={devices}")
    killer = threading.Timer(90, process.kill)
    killer.start()
    while (line := process.stdout.readline()) and not line.startswith("wandb:"):
        pass
    killer.cancel()
    time.sleep(2)  # into the epoch
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, _, err = command.finish(process, timeout=30)
    assert code == 1 and "Traceback" not in err


@pytest.mark.parametrize("wrong", ["--data.val_size=60000", "--data.val_size=59999"])
def test_a_mistake_all_processes_make_is_told_once(command: Any, tmp_path: Path, wrong: str) -> None:
    code, _, err = command("fit", *CPU, "--trainer.devices=2", wrong, timeout=60)
    assert code == 2
    assert err.count("error: ") == 1 and err.count("\n") == 2
    assert list(tmp_path.glob("runs")) == []
