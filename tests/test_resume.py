"""Real runs are resumed: one stopped at random moments ends as one that never stopped, a finished one goes on."""

import csv
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

MODEL = '''
import torch
from torch import nn
from lightning_mgpu.models.classifier import Classifier, OptimizerCallable


class DropoutNet(Classifier):
    """Draws random numbers in a step, and logs sums of tensors beside torchmetrics objects."""

    def __init__(self, optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)):
        super().__init__(optimizer)
        self.example_input_array = torch.zeros(1, 1, 28, 28)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[1]))
        self.log("max_loss", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss
'''
RUN = (
    *("--model=dropout_net.DropoutNet", "--data.source=synthetic", "--data.augment=true", "--trainer.accelerator=cpu"),
    *("--trainer.max_epochs=3", "--trainer.limit_train_batches=30", "--trainer.log_every_n_steps=4"),
    *("--trainer.limit_val_batches=2", "--trainer.limit_test_batches=2", "--checkpoint.last_every_n_minutes=0"),
)
TIMES = ("epoch_seconds", "samples_per_sec")
STRATEGIES = {
    "one_device": ("--trainer.devices=1",),
    "manual_allreduce": ("--trainer.devices=2", "--trainer.strategy=manual_allreduce"),
    "ddp": ("--trainer.devices=2", "--trainer.strategy=ddp"),
}


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMES} for row in csv.DictReader(file)]


def assert_same(whole: Path, resumed: Path) -> None:
    a, b = (torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (whole, resumed))
    assert [name for name in a["state_dict"] if not torch.equal(a["state_dict"][name], b["state_dict"][name])] == []
    assert metrics(whole) == metrics(resumed)
    assert a["callbacks"]["LearningCurve"] == b["callbacks"]["LearningCurve"]
    names = [sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (whole, resumed)]
    assert names[0] == names[1]


def stop(command: Any, args: tuple[str, ...], signum: int, after: float) -> tuple[int, str, str]:
    """Start a run and send it a signal, seconds after its header."""
    process = command.start("fit", *args)
    while (line := process.stdout.readline()) and not line.startswith("wandb:"):
        pass
    time.sleep(after)
    os.killpg(process.pid, signum)
    return command.finish(process, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    strategy: str, command: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "dropout_net.py").write_text(MODEL)
    args = (*RUN, *STRATEGIES[strategy])
    start = time.monotonic()
    code, out, err = command("fit", *args, "--run_dir=whole")
    assert code == 0, err
    seconds = float(out.rpartition("test acc")[2].split(", ")[1].split()[0]) * 3  # of training
    seed = random.randrange(10**6)
    print(f"seed {seed}; the whole run took {time.monotonic() - start:.1f} s, {seconds:.1f} s of it training")
    draw = random.Random(seed)
    now: tuple[str, ...] = (*args, "--run_dir=runs/stopped")
    steps = []
    for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        code, out, err = stop(command, now, signum, after=draw.uniform(0, seconds / 2))
        assert code in (0, 1, -signal.SIGKILL), err
        saved = tmp_path / "runs" / "stopped" / "checkpoints" / "last.ckpt"
        if not saved.exists():  # before the first batch
            shutil.rmtree(tmp_path / "runs" / "stopped", ignore_errors=True)
            continue
        steps.append(torch.load(saved, weights_only=True)["global_step"])
        if signum == signal.SIGINT and code == 1:
            assert "stopped; go on with: python -m lightning_mgpu fit --resume=runs/stopped" in out
        now = ("--resume=last",) if steps[1:] else ("--resume=runs/stopped",)
    print(f"stopped after steps {steps}")
    code, out, err = command("fit", *now)
    assert code == 0 and "test acc" in out, err
    assert_same(tmp_path / "whole", tmp_path / "runs" / "stopped")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, command_in: Callable[[Path], Any]) -> Path:
    """A run of two epochs; tests copy it."""
    directory = tmp_path_factory.mktemp("finished")
    (directory / "dropout_net.py").write_text(MODEL)
    code, _, err = command_in(directory)("fit", *RUN, "--trainer.devices=1", "--run_dir=run", "--trainer.max_epochs=2")
    assert code == 0, err
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


@pytest.fixture
def fit_again(run: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`fit` in this process, in the directory of a copy of the finished run."""
    monkeypatch.syspath_prepend(run.parent)
    return lambda *args: main("fit", *args)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_used(
    run: Path, fit_again: Callable, capfd: pytest.CaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    before, saved = metrics(run), torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    damage(run / "checkpoints" / "last.ckpt")
    assert fit_again("--resume=run") == 0
    assert "last.ckpt is damaged: going on from previous.ckpt" in "".join(str(w.message) for w in recwarn)
    assert metrics(run) == before
    again = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(torch.equal(value, again["state_dict"][name]) for name, value in saved["state_dict"].items())
    assert (run / "checkpoints" / "last.ckpt.damaged").exists()
    # both damaged: nothing to go on from, and nothing is changed
    damage(run / "checkpoints" / "last.ckpt"), damage(run / "checkpoints" / "previous.ckpt")
    capfd.readouterr()
    assert fit_again("--resume=run") == 2
    err = capfd.readouterr().err
    assert "no checkpoint to go on from (last.ckpt and previous.ckpt damaged)" in err and err.count("\n") == 1
    assert metrics(run) == before


@pytest.mark.slow
def test_a_longer_run_under_another_strategy(
    run: Path, fit_again: Callable, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """Flags that only say how long and where are taken, stay in the configuration, and are told."""
    before = metrics(run)
    moved = run.rename(tmp_path / "moved")
    devices = ("--trainer.devices=2", "--trainer.strategy=manual_allreduce")
    assert fit_again("--resume=moved", "--trainer.max_epochs=3", *devices) == 0
    out = capfd.readouterr().out
    assert "ckpt:     moved/checkpoints/last.ckpt; trainer.devices 1 -> 2" in out
    assert "trainer.max_epochs 2 -> 3" in out and "epoch 3/3" in out and "epoch 2/" not in out
    assert metrics(moved)[: len(before) - 1] == before[:-1]  # but the test at the end
    assert [row["epoch"] for row in metrics(moved)].count("2") > 1
    assert len(list((moved / "checkpoints").iterdir())) == 3  # best, last, previous
    assert fit_again("--resume=moved") == 0  # finished: tested once more, and nothing else
    assert "epoch 3/3" not in capfd.readouterr().out
    assert [bool(row["test_acc"]) for row in metrics(moved)].count(True) == 1


@pytest.mark.slow
def test_a_run_older_than_an_option(run: Path, fit_again: Callable, capfd: pytest.CaptureFixture) -> None:
    """It goes on with the option's default; another value would be another run."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    assert config["data"]["init_args"].pop("cutout") == 0 and config.pop("fast")
    path.write_text(yaml.safe_dump(config))
    before = path.read_bytes()
    assert fit_again("--resume=run", "--data.augment=true", "--data.cutout=3") == 2
    assert "--data.cutout=3 would make run another run, it has 0" in capfd.readouterr().err
    assert fit_again("--resume=run", "--fast.memory_format=channels_last") == 2
    assert "would make run another run, it has null" in capfd.readouterr().err and path.read_bytes() == before
    assert fit_again("--resume=run", "--trainer.max_epochs=3") == 0
    assert "trainer.max_epochs 2 -> 3\n" in capfd.readouterr().out
    assert yaml.safe_load(path.read_text())["data"]["init_args"]["cutout"] == 0


MISTAKES = {
    "fit --resume=nowhere": ("--resume=nowhere: no such run directory",),
    "fit --resume=last": ("--resume=last: no run in runs/ has a checkpoint",),
    "fit --resume": ("--resume: name a run directory, or 'last'",),
    "fit --resume=empty": ("empty is no run directory: it has no config.yaml",),
    "test --resume=run": ("--resume goes on with training",),
    "fit --resume=run --model.optimizer.lr=0.3": ("--model.optimizer.lr=0.3 would make run another run", "--ckpt_path"),
    "fit --resume=run --data.batch_size=3": ("--data.batch_size=3 would make run another run, it has 256",),
    "fit --resume=run --run_dir=other": ("--run_dir=other would make run another run",),
    "fit --resume=run --ckpt_path=run/checkpoints/last.ckpt": ("leave --ckpt_path out",),
    "fit --resume=run --trainer.max_epochs=1": ("--trainer.max_epochs=1: run has trained 2 epochs already",),
}


@pytest.mark.slow
@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes_leave_the_run_as_it_is(
    args: str, run: Path, main: Callable, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(run.parent)
    (run.parent / "empty").mkdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(*args.split()) == 2
    err = capfd.readouterr().err.replace(
        "warning: data.source=synthetic: training on made-up images; no accuracy below means anything.\n", ""
    )
    assert err.count("\n") == 1 and all(part in err for part in MISTAKES[args])
    assert all(path.read_bytes() == content for path, content in before.items())
