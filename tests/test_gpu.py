"""Every subcommand on every kind of device that the machine has: what to run first on a GPU.

    pytest -m gpu

It takes less than five minutes on one GPU and downloads nothing: the images are synthetic. At
its end it says what it saw: the GPU, its driver, and the seconds per epoch of LeNet and
ResNet-18.
"""

import csv
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.devices import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU")]
KINDS = ["cpu", *(gpu.type for gpu in gpus()[:1])]
IS_SIMULATED = KINDS[-1] == "sim"  # where these tests themselves are tried
CKPT = "--ckpt_path=run/checkpoints/last.ckpt"
FEW = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test", "predict")]
TWO = (
    "--trainer.devices=1",
    "--trainer.strategy=manual_allreduce",
    "--trainer.strategy.replicas=2",
)
Run = Callable[..., str]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the commands for one kind of device."""
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def run(directory: Path, command_in: Callable[..., Any]) -> Iterator[Run]:
    """Run `python -m ...`; returns what it prints."""
    command = command_in(directory)

    def run(*args: str, module: str = "lightning_mgpu") -> str:
        process = command.start(*args, launcher=("-m", module), OMP_NUM_THREADS="4")
        status, out, err = command.finish(process, timeout=280)
        assert status == 0, f"{out}\n{err}"
        return str(out)

    yield run
    command.end()


@pytest.fixture(scope="module")
def options(kind: str) -> list[str]:
    return ["--data.source=synthetic", f"--trainer.accelerator={kind}", *FEW]


@pytest.fixture(scope="module")
def trained(run: Run, options: list[str]) -> str:
    """The output of a `fit` that trains two replicas on one device."""
    return run("fit", *options, *TWO, "--trainer.max_epochs=1", "--run_dir=run")


def test_fit(trained: str, kind: str) -> None:
    assert f"Strategy (textbook_allreduce) on {kind}" in trained and "epoch 1/1" in trained


STRATEGIES = ["auto", "ddp", "dp", "manual_allreduce", "manual_allreduce_ring"]


@pytest.mark.skipif(len(gpus()) < 2, reason="needs several GPUs")
# gloo has no simulated devices
@pytest.mark.parametrize("strategy", STRATEGIES[1 + IS_SIMULATED :])
def test_fit_on_all_gpus(strategy: str, run: Run, options: list[str], kind: str) -> None:
    if kind == "cpu":
        pytest.skip("what all other tests do")
    all_gpus = (f"--trainer.devices={min(len(gpus()), 4)}", f"--trainer.strategy={strategy}")
    assert f"{kind}:1" in run("fit", *options, *all_gpus, "--trainer.max_epochs=1")


def test_resume(trained: str, run: Run, kind: str) -> None:
    out = run("fit", "--resume=run", "--trainer.max_epochs=2")
    assert "epoch 2/2" in out and "epoch 1/" not in out and f"on {kind}" in out


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluation(name: str, trained: str, run: Run, options: list[str], kind: str) -> None:
    out = run(name, *options, CKPT, "--trainer.devices=1", f"--run_dir={name}")
    assert f"SingleDeviceStrategy on {kind}" in out


def test_export(trained: str, run: Run) -> None:
    assert "model.pt2: LeNet" in run("export", CKPT, "--output=model.pt2")


def test_sweep(run: Run, options: list[str], directory: Path, kind: str) -> None:
    short = (*options, "--trainer.devices=1", "--trainer.max_epochs=1")
    run("sweep", "--config=sweep/lenet_lr.yaml", "--count=1", *short)
    assert f"on {kind}" in (directory / "sweeps/lenet_lr/trial_000.log").read_text()


def test_benchmark(run: Run, kind: str) -> None:
    if kind == "cpu":
        pytest.skip("it measures GPUs where there are some")
    few = (
        "--repeats=1",
        "--num_steps=2",
        "--sizes=4096",
        "--seconds=0.01",
        "--devices=1",
        "--replicas=2",
    )
    out = run("benchmark", "--quick", *few, "--strategies", "dp", "--algorithms", "textbook")
    name = torch.get_device_module(kind).get_device_name(0)
    assert name in out and "Not measured" not in out


def test_testing(run: Run, kind: str) -> None:
    out = run(
        "--strategy=manual_allreduce",
        "--devices=1",
        f"--accelerator={kind}",
        module="lightning_mgpu.testing",
    )
    assert "kept" in out and "BROKEN" not in out


@pytest.mark.parametrize("model", ["LeNet", "ResNet18"])
def test_seconds_per_epoch(
    model: str, kind: str, run: Run, directory: Path, record_property: Callable[[str, str], None]
) -> None:
    """The second epoch is measured: 60,000 images in batches of 256."""
    if kind == "cpu":
        pytest.skip("takes minutes on a CPU")
    limits = [*(("--trainer.limit_train_batches=3",) if IS_SIMULATED else ()), *FEW[1:]]
    options = (
        "--data.source=synthetic",
        "--data.val_size=0",
        f"--trainer.accelerator={kind}",
        "--trainer.devices=1",
    )
    run(
        "fit", f"--model={model}", *options, *limits, "--trainer.max_epochs=2", f"--run_dir={model}"
    )
    with (directory / model / "metrics.csv").open() as file:
        seconds = [
            float(row["epoch_seconds"]) for row in csv.DictReader(file) if row["epoch_seconds"]
        ]
    assert len(seconds) == 2 and seconds[-1] > 0
    of = "for three batches" if IS_SIMULATED else "per epoch"
    record_property("gpu", f"{about(kind)}: {model} {seconds[-1]:.2f} s {of}")


def about(kind: str) -> str:
    """`NVIDIA T4, driver 550.54, torch 2.9.0+cu128`."""
    words = [torch.get_device_module(kind).get_device_name(0), f"torch {torch.__version__}"]
    if kind == "cuda":  # torch knows the driver by CUDA's version only
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        words.insert(1, f"driver {driver.splitlines()[0]}")
    return ", ".join(words)
