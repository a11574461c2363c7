"""Every subcommand in a process of its own on simulated devices."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulated.devices import PATHS, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="needs g++ to build the simulated devices"
    ),
]
TWO = ("--trainer.devices=2", "--trainer.strategy=manual_allreduce")
LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test", "predict")]
SHORT = ("--data.source=synthetic", "--trainer.accelerator=sim", *LIMITS)
CKPT = "--ckpt_path=run/checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands run."""
    return tmp_path_factory.mktemp("on_sim")


@pytest.fixture(scope="module")
def on_sim(directory: Path, command_in: Callable[..., Any]) -> Iterator[Callable[..., str]]:
    """Run `python -m ...`; returns what it prints."""
    build()
    command = command_in(directory)
    command.env["PYTHONPATH"] = os.pathsep.join(PATHS)

    def run(*args: str, module: str = "lightning_mgpu") -> str:
        status, out, err = command.finish(
            command.start(*args, launcher=("-m", module)), timeout=240
        )
        assert status == 0, f"{out}\n{err}"
        return str(out)

    yield run
    command.end()


@pytest.fixture(scope="module")
def trained(on_sim: Callable[..., str]) -> str:
    """What `fit` prints."""
    return on_sim("fit", *SHORT, *TWO, "--trainer.max_epochs=1", "--run_dir=run")


def test_fit(trained: str) -> None:
    assert (
        "ManualAllreduceStrategy (textbook_allreduce) on sim:0, sim:1" in trained
        and "epoch 1/1" in trained
    )
    assert "sec/epoch on [device(type='sim', index=0), device(type='sim', index=1)]" in trained


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluation(name: str, trained: str, on_sim: Callable[..., str]) -> None:
    """On one device, by a checkpoint of two."""
    assert "SingleDeviceStrategy on sim:0" in on_sim(
        name, *SHORT, CKPT, "--trainer.devices=1", f"--run_dir={name}"
    )


def test_resume(trained: str, on_sim: Callable[..., str]) -> None:
    out = on_sim("fit", "--resume=run", "--trainer.max_epochs=2")
    assert "epoch 2/2" in out and "epoch 1/" not in out and "on sim:0, sim:1" in out


def test_export(trained: str, on_sim: Callable[..., str]) -> None:
    assert "model.pt2: LeNet" in on_sim("export", CKPT, "--output=model.pt2")


def test_sweep(on_sim: Callable[..., str], directory: Path) -> None:
    options = (*SHORT, "--trainer.devices=2", "--trainer.strategy=dp", "--trainer.max_epochs=1")
    on_sim("sweep", "--config=sweep/lenet_lr.yaml", "--count=1", *options)
    assert "on sim:0, sim:1" in (directory / "sweeps/lenet_lr/trial_000.log").read_text()


def test_benchmark(on_sim: Callable[..., str]) -> None:
    """Its tables, and the names of the devices."""
    few = ("--repeats=1", "--num_steps=1", "--batch_size=8", "--sizes=4096", "--seconds=0.01")
    out = on_sim("benchmark", "--quick", *few, "--strategies", "dp", "--algorithms", "ring")
    assert "simulated" in out and "not measured" not in out


def test_testing(on_sim: Callable[..., str]) -> None:
    arguments = ("--strategy=manual_allreduce", "--devices=2", "--accelerator=sim")
    out = on_sim(*arguments, module="lightning_mgpu.testing")
    assert "kept" in out and "BROKEN" not in out
