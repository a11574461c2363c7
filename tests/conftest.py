"""A tiny dataset in the real file format, one thread per process, two ways to run commands."""

import contextlib
import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; handed on to subprocesses
# set by the pytest that started this one: `wandb.teardown()` waits only for a service of its own
os.environ.pop("WANDB_SERVICE", None)

import pytest
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from torch import Tensor

import lightning_mgpu.data.fashion_mnist
import lightning_mgpu.strategies  # registers them, for Trainers made in Python
from lightning_mgpu import __main__ as program
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.data.fashion_mnist import synthetic_fashion_mnist
from lightning_mgpu.data.sources import FILES, ensure_fashion_mnist

torch.set_num_threads(1)
# in a shell's background job, whose child processes would ignore Ctrl-C, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
REPOSITORY = Path(__file__).parents[1]
NUM_TRAIN, NUM_TEST = 503, 107  # primes: every batch size and number of processes is uneven


def write_idx(path: Path, values: Tensor) -> str:
    """Write uint8 values (N, 28, 28) or (N,) as an IDX file; returns its MD5."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(content := header + values.to(torch.uint8).numpy().tobytes())
    return hashlib.md5(content).hexdigest()


def run_devices(num: int) -> list[torch.device]:
    """The devices of a Trainer with `num` CPU devices; `-p tests.simulated.devices` has others."""
    is_simulated = torch._C._get_privateuse1_backend_name() == "sim"
    return [torch.device("sim", i) if is_simulated else torch.device("cpu") for i in range(num)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the times that `pytest -m gpu` has measured."""
    passed = terminalreporter.stats.get("passed", [])
    if lines := [
        value for report in passed for name, value in report.user_properties if name == "gpu"
    ]:
        terminalreporter.section("what these tests saw")
        terminalreporter.write("\n".join([*lines, ""]))


@pytest.fixture
def run_files() -> set[str]:
    """The files that `fit` leaves in its run directory without W&B."""
    pictures = ("curve.png", "predictions.png", "confusion.png")
    texts = ("config.yaml", "run.json", "model.txt", "hparams.yaml", "metrics.csv")
    return {*texts, *pictures, "checkpoints"}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """`data.root` of a dataset of 503 and 107 images, and its files' checksums."""
    root = tmp_path_factory.mktemp("data")
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    values = [
        part
        for num, seed in ((NUM_TRAIN, 1), (NUM_TEST, 0))
        for part in synthetic_fashion_mnist(num, seed)
    ]
    return root, {
        name: write_idx(raw / name, part.flatten(0, -3) if part.ndim > 1 else part)
        for name, part in zip(FILES, values)
    }


@pytest.fixture
def root(tiny_files: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `FashionMNIST(root=...)` accept the tiny dataset, by the real checks."""
    root, files = tiny_files
    ensure = partial(ensure_fashion_mnist, files=files)
    monkeypatch.setattr(lightning_mgpu.data.fashion_mnist, "ensure_fashion_mnist", ensure)
    return root


@pytest.fixture
def make_data(root: Path) -> Callable[..., FashionMNIST]:
    """A data module on the tiny dataset, prepared and set up."""

    def make(**kwargs: Any) -> FashionMNIST:
        data = FashionMNIST(
            **{"root": str(root), "batch_size": 64, "val_size": 101, "seed": 3, **kwargs}
        )
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """A quiet Trainer on one CPU that writes nothing unless told to."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {**dict.fromkeys(off, False), "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    usual = {**quiet, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return lambda **kwargs: Trainer(**{**usual, **kwargs})


save_figure = Figure.savefig


def save_empty_figure(figure: Figure, *args: Any, **kwargs: Any) -> None:
    save_figure(Figure(figsize=(1, 1)), *args, **kwargs)


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run a command line in this process and an empty directory; returns the exit status.

    Pictures are made, but saved empty: else half of a short run is text that matplotlib draws.
    """
    monkeypatch.setattr(Figure, "savefig", save_empty_figure)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def run(*args: str, package: str = "lightning_mgpu") -> int:
        monkeypatch.setattr(sys, "argv", ["lightning-mgpu", *args])
        try:
            program.main(package)
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    with mock.patch.dict(os.environ, {"WANDB_MODE": "disabled"}):
        os.environ.pop("PL_GLOBAL_SEED", None)
        yield run
    # another test may write a file of the same name
    for name, module in [*sys.modules.items()]:
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def without_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it was not installed."""

    def remove(package: str) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)
        missing = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
        (tmp_path / f"{package}.py").write_text(missing)
        monkeypatch.syspath_prepend(tmp_path)

    return remove


PROGRAM = ("-m", "lightning_mgpu")


class Command:
    """`python -m lightning_mgpu` in processes of its own; none of them may outlive it."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        self.env = {
            **os.environ,
            "HOME": str(cwd),
            "PYTHONPATH": path,
            "WANDB_MODE": "disabled",
            "COLUMNS": "120",
        }
        for name in ("PL_GLOBAL_SEED", "LIGHTNING_MGPU_RUN_DIR", "WANDB_API_KEY", "WANDB_SERVICE"):
            self.env.pop(name, None)
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, *args: str, launcher: tuple[str, ...] = PROGRAM, **env: str
    ) -> subprocess.Popen[str]:
        files: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        line, env = [sys.executable, *launcher, *args], {**self.env, **env}
        process = subprocess.Popen(
            line, cwd=self.cwd, env=env, text=True, start_new_session=True, **files
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout: float) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            pytest.fail(
                "\n".join(
                    [f"{process.args} was not done after {timeout} s", *process.communicate()]
                )
            )
        for _ in range(50):  # children may need a moment to go
            if not group_lives(process.pid):
                return process.returncode, out, err
            time.sleep(0.1)
        end(process)
        pytest.fail(f"processes left behind\n{out}\n{err}")

    def __call__(self, *args: str, timeout: float = 120) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        return self.finish(self.start(*args), timeout)

    def end(self) -> None:
        """End the processes that a failed test has not waited for."""
        for process in self._started:
            end(process)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its group; first it may end children with groups of their own."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(timeout=40)
    if group_lives(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.end()


@pytest.fixture(scope="session")
def command_in() -> type[Command]:
    """`command` in a directory of one's own, for runs several tests share."""
    return Command
