"""A tiny dataset in the real file format, one thread per process, two ways to run commands."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
import warnings
from argparse import ArgumentTypeError
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; handed on to subprocesses
os.environ.pop("WANDB_SERVICE", None)  # `wandb.teardown()` waits only for a service of its own

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from lightning_mgpu.cli.main import main as run_command_line
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.data import FashionMNIST, fashion_mnist

torch.set_num_threads(1)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)  # our children need Ctrl-C
REPOSITORY = Path(__file__).parents[1]
NUM_TRAIN, NUM_TEST = 503, 107  # primes: every batch size and number of processes is uneven
save_figure = Figure.savefig


def pytest_addoption(parser):
    group = parser.getgroup("promises of strategies, tests/test_promises.py")
    text = "print a table for these names, or paths: my_package.MyStrategy"
    group.addoption("--strategies", nargs="+", default=[], help=text)
    group.addoption("--devices", type=int, default=2, help="devices per strategy (default: 2)")
    group.addoption("--accelerator", default="cpu", help="of the devices (default: cpu)")
    text = "arguments of the strategies, name=value"
    group.addoption("--options", nargs="+", default=[], type=name_and_value, help=text)


def name_and_value(text):
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text}: write name=value")
    return name, yaml.safe_load(value)


def pytest_configure(config):
    """Raise a usage error for a strategy that cannot be made."""
    strategies = config.getoption("strategies")
    sys.path[:0] = [os.getcwd()] if strategies else []  # as `python -m pytest` does
    for strategy in strategies:
        try:
            make_strategy(strategy, **dict(config.getoption("options")))
        except Exception as error:  # of your own class, too
            raise pytest.UsageError(str(error)) from error


def pytest_terminal_summary(terminalreporter):
    """Print the promises of `--strategies` as a table. A case without a report has no answer."""
    if not (strategies := terminalreporter.config.getoption("strategies")):
        return
    from tests.test_promises import PROMISES

    answers = {}
    for outcome, answer in (("passed", "yes"), ("skipped", ""), ("failed", "no"), ("error", "no")):
        for report in terminalreporter.getreports(outcome):
            if case := report.nodeid.partition("::test_promise[")[2].removesuffix("]"):
                # "Skipped: refused: the reason"
                answers[case] = answer or report.longrepr[2].split(": ")[1]
    lines = [["promise", *(f"`{name}`" for name in strategies)]]
    lines += [["---", *(":-:" for _ in strategies)]]
    lines += [[p, *(answers.get(f"{name}: {p}", "") for name in strategies)] for p in PROMISES]
    for line in lines:
        terminalreporter.write_line(f"| {' | '.join(line)} |")


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    """`data.root` of a dataset of 503 and 107 images."""
    raw = (root := tmp_path_factory.mktemp("data")) / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, num, seed in (("train", NUM_TRAIN, 1), ("t10k", NUM_TEST, 0)):
        X, y = fashion_mnist.synthetic_fashion_mnist(num, seed)
        write_idx(raw / f"{split}-images-idx3-ubyte", X.flatten(0, -3))
        write_idx(raw / f"{split}-labels-idx1-ubyte", y)
    return root


def write_idx(path, values):
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.to(torch.uint8).numpy().tobytes())


@pytest.fixture
def root(tiny_root, monkeypatch):
    """Makes `FashionMNIST(root=...)` of this process take the tiny dataset."""
    monkeypatch.setattr(fashion_mnist, "ensure_fashion_mnist", lambda root, *_: f"files in {root}")
    return tiny_root


@pytest.fixture
def make_data(root):
    def make(**kwargs):
        usual = {"root": str(root), "batch_size": 64, "val_size": 101, "seed": 3}
        data = FashionMNIST(**{**usual, **kwargs})
        data.prepare_data()
        data.setup("fit")
        return data

    return make


@pytest.fixture
def make_trainer(tmp_path):
    """A quiet Trainer on one CPU that writes nothing by default."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {**dict.fromkeys(off, False), "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    usual = {**quiet, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return lambda **kwargs: Trainer(**{**usual, **kwargs})


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run `python -m PACKAGE ARGS` in this process and an empty directory; the exit status."""
    # pictures are saved empty: else half of a short run is text that matplotlib draws
    empty = Figure(figsize=(1, 1))
    monkeypatch.setattr(Figure, "savefig", lambda _, *args, **kw: save_figure(empty, *args, **kw))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    handlers = [*getLogger("lightning.pytorch").handlers, *getLogger("lightning.fabric").handlers]

    def run(*args, package="lightning_mgpu"):
        signals = {number: signal.getsignal(number) for number in SIGNALS}
        with mock.patch.dict(os.environ), monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{package}/__main__.py", *args])
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(sys, "meta_path", [*sys.meta_path])
            patch.setattr(warnings, "formatwarning", warnings.formatwarning)
            spec = find_spec(f"{package}.__main__")
            patch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
            for handler in handlers:
                patch.setattr(handler, "filters", [*handler.filters])
            try:
                run_command_line()
            except SystemExit as error:
                return int(error.code or 0)
            finally:
                for number, action in signals.items():
                    signal.signal(number, action)
        return 0

    yield run
    # another test may write a file of the same name
    for name, module in [*sys.modules.items()]:
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def in_two_processes():
    """Call a function of a test file in two processes, which all tests share; their results."""
    from tests.strategies.conftest import Group

    groups = []

    def run(function, *args, **kwargs):
        group = groups.pop() if groups else Group(2)
        try:
            group.send(function.__module__, function.__name__, args, kwargs)
            results = group.receive()
            groups.extend([group] if all(each.is_alive() for each in group.processes) else [])
            return results
        finally:
            if group not in groups:  # it hangs, or a process has ended
                group.end()

    yield run
    for group in groups:
        group.end()


class Command:
    """`python -m lightning_mgpu` in processes of its own; none of them may outlive it."""

    def __init__(self, cwd):
        self.cwd = cwd
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        own = {"HOME": str(cwd), "PYTHONPATH": path, "WANDB_MODE": "disabled", "COLUMNS": "120"}
        self.env = os.environ | own
        for name in ("PL_GLOBAL_SEED", "WANDB_API_KEY"):
            self.env.pop(name, None)
        self.started = []

    def start(self, *args, launcher=("-m", "lightning_mgpu"), **env):
        line, env, pipe = [sys.executable, *launcher, *args], {**self.env, **env}, subprocess.PIPE
        process = subprocess.Popen(
            line, cwd=self.cwd, env=env, text=True, start_new_session=True, stdout=pipe, stderr=pipe
        )
        self.started.append(process)
        return process

    def finish(self, process, timeout):
        """Exit status, stdout and stderr; fails if the process leaves others behind."""
        out, err = process.communicate(timeout=timeout)
        for _ in range(50):  # children may need a moment to go
            if not group_lives(process.pid):
                return process.returncode, out, err
            time.sleep(0.1)
        pytest.fail(f"processes left behind\n{out}\n{err}")

    def __call__(self, *args, timeout=120):
        return self.finish(self.start(*args), timeout)

    def end(self):
        for process in self.started:
            process.terminate()  # it ends children with groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            if group_lives(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def group_lives(group):
    with contextlib.suppress(ProcessLookupError):
        return os.killpg(group, 0) is None
    return False


@pytest.fixture
def command(tmp_path):
    command = Command(tmp_path)
    yield command
    command.end()
