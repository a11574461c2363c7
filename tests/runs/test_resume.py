"""A run that was stopped ends as one that never was: weights, optimizer, schedulers, metrics, files."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.runs.directory import claimed
from tests.runs.conftest import DATA, OWN, RUN, STRATEGIES, assert_same, last, metrics

CPU = "--trainer.accelerator=cpu"


@pytest.mark.parametrize("strategy", ["one_device", "manual_allreduce"])
def test_stopped_three_times(strategy: str, fit: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
    """Before the first epoch is over, and in two generations of resumed runs."""
    assert fit(*STRATEGIES[strategy], "--run_dir=whole") == 0
    assert fit(*STRATEGIES[strategy], "--run_dir=stopped", stop="0,3") == 1
    assert "stopped; go on with: python -m lightning_mgpu fit --resume=stopped" in capfd.readouterr().out
    assert fit("--resume=stopped", stop="2,1") == 1
    assert last(tmp_path / "stopped")["epoch"] == 2
    assert fit("--resume=stopped", stop="3,5") == 1
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def kill_after(command: Any, line: str, *args: str) -> None:
    """Start a run, and `kill -9` it with all its processes when it prints a line that begins so."""
    process = command.start("fit", *args)
    while (printed := process.stdout.readline()) and not printed.startswith(line):
        pass
    assert printed.startswith(line), process.stderr.read()
    os.killpg(process.pid, signal.SIGKILL)
    assert command.finish(process, timeout=60)[0] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kill_9(strategy: str, command: Any, tmp_path: Path) -> None:
    (tmp_path / "own_run.py").write_text(OWN)
    few = ("--data.source=synthetic", "--trainer.limit_train_batches=20", "--trainer.limit_val_batches=2")
    args = (*RUN, *DATA, *few, "--trainer.limit_test_batches=2", *STRATEGIES[strategy])
    code, _, err = command("fit", *args, "--run_dir=whole")
    assert code == 0, err
    kill_after(command, "epoch 2/4", *args, "--run_dir=killed")
    code, out, err = command("fit", "--resume=killed")
    assert code == 0 and "epoch 1/4" not in out and "batch:    64 global" in out, err
    assert "batches of its own" not in err  # the processes of `ddp` share them
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_plain_loader_draws_the_same_batches(fit: Callable[..., int], tmp_path: Path) -> None:
    """It draws its order from the generator that dropout draws from."""
    args = (*RUN, "--data=own_run.Shuffled", "--trainer.devices=1")
    assert fit(*args, "--run_dir=whole") == 0
    assert fit(*args, "--run_dir=stopped", stop="2,1") == 1
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_longer_run_elsewhere_under_another_strategy(run: Path, fit: Callable[..., int], capfd: Any) -> None:
    """Flags that only say how long and where are taken, and stay in the configuration."""
    before = metrics(run)
    moved = run.rename(run.with_name("moved"))
    assert fit("--resume=moved", "--trainer.max_epochs=3", *STRATEGIES["manual_allreduce"]) == 0
    out = capfd.readouterr().out
    assert "ckpt:     moved/checkpoints/last.ckpt" in out and "on 2 x cpu" in out
    assert "epoch 3/3" in out and "epoch 2/" not in out
    assert metrics(moved)[: len(before) - 1] == before[:-1]  # but the test at the end
    assert len(list((moved / "checkpoints").iterdir())) == 2
    assert fit("--resume=moved") == 0  # finished: tested once more, and nothing else
    assert "epoch 3/3" not in capfd.readouterr().out
    assert [bool(row["test_acc"]) for row in metrics(moved)].count(True) == 1


def test_a_damaged_checkpoint_is_not_used(run: Path, fit: Callable[..., int], capfd: Any) -> None:
    before, path = metrics(run), run / "checkpoints" / "last.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert fit("--resume=run") == 2
    assert "cannot be read: it is damaged" in capfd.readouterr().err and metrics(run) == before


MISTAKES = {
    ("--resume=run", "--model.optimizer.lr=0.3"): "--model.optimizer.lr=0.3 would make run another run",
    ("--resume=run", "--data.batch_size=3"): "--data.batch_size=3 would make run another run",
    ("--resume=run", "--run_dir=other"): "--run_dir=other would make run another run",
    (
        "--resume=run",
        "--ckpt_path=run/checkpoints/last.ckpt",
    ): "last.ckpt would make run another run",
    ("--resume=run", "--trainer.max_epochs=1"): "--trainer.max_epochs=1: run has trained 2 epochs already",
}


@pytest.mark.parametrize("args", MISTAKES, ids=" ".join)
def test_mistakes_leave_the_run_as_it_is(args: tuple[str, ...], run: Path, fit: Callable[..., int], capfd: Any) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert fit(*args) == 2
    assert MISTAKES[args] in capfd.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_run_is_not_resumed_beside_itself(run: Path, fit: Callable[..., int], capfd: Any) -> None:
    with claimed(run):
        assert fit("--resume=run") == 2
    assert "run is still running in another process" in capfd.readouterr().err


class TestWithinAnEpoch:
    """Lightning's own checkpoints, which a step, SLURM's signal or a limit of steps ends an epoch with."""

    def test_the_right_batch_comes_next(self, fit: Callable[..., int], tmp_path: Path) -> None:
        plain = ("--trainer.devices=1", "--trainer.max_epochs=2", "--model=LeNet")
        every = ("--checkpoint.every_n_train_steps=5", "--checkpoint.save_top_k=-1")
        assert fit(*plain, *every, "--run_dir=a") == 0
        (path,) = (tmp_path / "a" / "checkpoints").glob("*step=5.ckpt")
        assert fit(*plain, f"--ckpt_path={path}", "--run_dir=b") == 0
        a, b = last(tmp_path / "a")["state_dict"], last(tmp_path / "b")["state_dict"]
        assert all(torch.equal(a[name], b[name]) for name in a)  # LeNet draws no random numbers

    def test_a_loader_without_a_state_is_refused(self, fit: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
        args = (*RUN, "--data=own_run.Shuffled", "--trainer.devices=1")
        every = ("--checkpoint.every_n_train_steps=3", "--checkpoint.save_top_k=-1")
        assert fit(*args, *every, "--run_dir=a", "--trainer.max_epochs=1") == 0
        (path,) = (tmp_path / "a" / "checkpoints").glob("*step=3.ckpt")
        capfd.readouterr()
        assert fit(*args, f"--ckpt_path={path}", "--run_dir=b") == 2
        err = capfd.readouterr().err
        assert "the data loader cannot tell which batches are left" in err and err.count("\n") <= 2

    def test_a_run_that_max_steps_ended_is_refused(self, fit: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
        assert fit("--trainer.devices=1", "--trainer.max_steps=3", "--run_dir=a") == 0
        assert fit("--resume=a", "--trainer.max_steps=20") == 2
        assert "the run ended within an epoch" in capfd.readouterr().err
