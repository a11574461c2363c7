"""A stopped run ends like one that never stopped: weights, optimizer, metrics, files."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_mgpu.cli import run_trainer
from lightning_mgpu.devices import describe_devices
from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config
from lightning_mgpu.runs.directory import lock_run_dir
from lightning_mgpu.runs.run_json import find_state, read_run_json
from tests.conftest import run_devices
from tests.runs.conftest import DATA, RUN, STRATEGIES, assert_same, equal, last, metrics


@pytest.mark.parametrize("strategy", ["one_device", "manual_allreduce"])
def test_stopped_three_times(
    strategy: str, fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """The run is killed in its first epoch, and then in two generations of resumed runs."""
    assert fit(*STRATEGIES[strategy], "--run_dir=whole") == 0
    assert fit(*STRATEGIES[strategy], "--run_dir=stopped", stop="0,3") == 1
    assert (
        "stopped; go on with: python -m lightning_mgpu fit --resume=stopped"
        in capfd.readouterr().out
    )
    assert fit("--resume=stopped", stop="2,1") == 1
    assert last(tmp_path / "stopped")["epoch"] == 2
    assert fit("--resume=stopped", stop="3,5") == 1
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


FUNCTIONS = """
from collections.abc import Callable
from lightning.pytorch import Callback

class Uses(Callback):
    def __init__(self, f: Callable, g: Callable | str, h: Callable | str = lambda x: x) -> None:
        print("used", f(0.0), g, h(0.0))

    @classmethod
    def method(cls) -> None: ...
"""


def test_texts_and_functions_as_values_are_resumed(
    fit: Callable[..., int], own: Path, capfd: Any
) -> None:
    (own / "functions.py").write_text(FUNCTIONS)
    used = ("--trainer.callbacks+=functions.Uses", "--trainer.callbacks.f=math.cos")
    name = "--checkpoint.filename={epoch}-{val_loss:.1f}"
    options = ("--trainer.devices=1", "--trainer.max_epochs=1", "--run_dir=run", name, *used)
    # infinity, of which JSON has no text, and one that is a number to one YAML, a text to another
    options += ("--trainer.gradient_clip_val=.inf", "--wandb.name=1e-5")
    options += ("--trainer.log_every_n_steps=0",)
    assert fit(*options, "--trainer.callbacks.g=functions.Uses.method") == 2
    assert "--trainer.callbacks.g=<bound method Uses.method " in capfd.readouterr().err
    assert fit(*options, "--trainer.callbacks.g=cosine") == 0
    assert fit("--resume=run", "--trainer.max_epochs=2") == 0
    assert capfd.readouterr().out.count("used 1.0 cosine 0.0\n") == 2
    assert list((own / "run" / "checkpoints").glob("epoch=[01]-val_loss=*.ckpt"))


HYPERPARAMETERS = """
from collections.abc import Callable
from own_run import Net

class Saves(Net):
    def __init__(self, activation: Callable | str = "tanh") -> None:
        super().__init__()
        self.save_hyperparameters()
        print("saved", self.hparams["activation"])
"""


def test_a_text_is_saved_as_a_hyperparameter(
    fit: Callable[..., int], own: Path, capfd: Any
) -> None:
    (own / "own_hyperparameters.py").write_text(HYPERPARAMETERS)
    model = ("--model=own_hyperparameters.Saves", "--model.activation=gelu")
    assert fit(*model, "--trainer.devices=1", "--trainer.fast_dev_run=true") == 0
    assert "saved gelu\n" in capfd.readouterr().out


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
def test_kill_9(
    strategy: str, command: Any, main: Callable[..., int], own: Path, tmp_path: Path
) -> None:
    limits = [f"--trainer.limit_{stage}_batches=2" for stage in ("val", "test")]
    few = ("--data.source=synthetic", "--trainer.limit_train_batches=20", *limits)
    few = (*few, "--trainer.max_epochs=3", "--pictures=false")
    args = (*RUN, *DATA, *few, *STRATEGIES[strategy])
    if strategy == "ddp":
        code, _, err = command("fit", *args, "--run_dir=whole")
        assert code == 0, err
    else:  # in this process, as another one takes seconds to start
        assert main("fit", *args, "--run_dir=whole") == 0
    kill_after(command, "epoch 1/3", *args, "--run_dir=killed")
    assert find_state(tmp_path / "killed") == "interrupted"
    code, out, err = command("fit", "--resume=killed")
    assert code == 0 and "epoch 1/3" not in out and "batch:    64 global" in out, err
    assert "batches of its own" not in err  # the processes of `ddp` share them
    assert_same(tmp_path / "whole", tmp_path / "killed")
    whole, killed = (read_run_json(tmp_path / name) for name in ("whole", "killed"))
    assert (whole["num_resumes"], killed["num_resumes"]) == (0, 1)  # the first process counts
    for key in ("best", "validation", "test", "fingerprint", "epochs", "state"):
        assert whole["end"][key] == killed["end"][key], key


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", ["Shuffled", "InBatches"])
def test_random_samples(
    data: str, num_workers: int, fit: Callable[..., int], tmp_path: Path
) -> None:
    """A plain loader draws its order from the generator that dropout draws from."""
    args = (*RUN, f"--data=own_run.{data}", f"--data.num_workers={num_workers}")
    args = (*args, "--trainer.devices=1", "--trainer.max_epochs=3")
    assert fit(*args, "--run_dir=whole") == 0
    assert fit(*args, "--run_dir=stopped", stop="2,1") == 1
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_longer_run_elsewhere_under_another_strategy(
    run: Path, fit: Callable[..., int], capfd: Any
) -> None:
    """Flags that only say how long and where are taken, and stay in the configuration."""
    before = metrics(run)
    moved = run.rename(run.with_name("moved"))
    assert fit("--resume=moved", "--trainer.max_epochs=3", *STRATEGIES["manual_allreduce"]) == 0
    out = capfd.readouterr().out
    assert (
        "ckpt:     moved/checkpoints/last.ckpt" in out
        and f"on {describe_devices(run_devices(2))}" in out
    )
    assert "epoch 3/3" in out and "epoch 2/" not in out
    assert metrics(moved)[: len(before) - 1] == before[:-1]  # but the test at the end
    assert len(list((moved / "checkpoints").iterdir())) == 2
    assert fit("--resume=moved") == 0  # finished: tested once more, and nothing else
    assert "epoch 3/3" not in capfd.readouterr().out
    assert [bool(row["test_acc"]) for row in metrics(moved)].count(True) == 1


def test_the_newest_run_is_resumed_wherever_it_is(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """Its checkpoints hold the weights only, and know their model; W&B goes on."""
    short = ("--trainer.devices=1", "--trainer.max_epochs=1", "--no-wandb")
    assert fit(*short) == 0
    elsewhere = tmp_path / "elsewhere"
    only = "--checkpoint.save_weights_only=true"
    assert fit(*short, f"--run_dir={elsewhere}", only, stop="0,1") == 1
    assert "wandb:    off (--wandb.mode=disabled)" in capfd.readouterr().out
    assert fit("--resume=last", "--wandb.mode=auto") == 0
    assert "wandb:    off (WANDB_MODE=disabled)" in capfd.readouterr().out
    path = elsewhere / "checkpoints" / "last.ckpt"
    config = saved_config(read_checkpoint(path), path)
    assert config["model"]["class_path"] == "own_run.Net"
    shutil.rmtree(elsewhere)
    assert fit("--resume=last") == 2
    assert "elsewhere: no run directory" in capfd.readouterr().err


def test_processes_that_are_started_get_what_was_typed(
    run: Path, fit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("--trainer.strategy", "manual_allreduce_ring", "--trainer.strategy.replicas=2")
    seen: list[list[str]] = []
    monkeypatch.setattr(run_trainer, "train", lambda *_: sys.exit(seen.append(sys.argv[1:])))
    assert fit("--resume=run", *args, "--trainer.devices=2") == 0
    assert seen == [["fit", "--resume=run", *args, "--trainer.devices=2", "--resume=run"]]


def test_mistakes_leave_the_run_as_it_is(run: Path, fit: Callable[..., int], capfd: Any) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for option in (
        "--model.optimizer.lr=0.3",
        "--run_dir=other",
        "--ckpt_path=run/checkpoints/last.ckpt",
    ):
        assert fit("--resume=run", option) == 2
        assert f"{option}: run has " in capfd.readouterr().err
    assert fit("--resume=run", "--trainer.max_epochs=1") == 2
    assert "--trainer.max_epochs=1: run has trained 2 epochs already" in capfd.readouterr().err
    lock = lock_run_dir(run)
    assert fit("--resume=run") == 2
    os.close(lock)
    assert "run is still running in another process" in capfd.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())
    checkpoint = last(run)
    checkpoint["lightning_mgpu"]["streams"] = 1
    torch.save(checkpoint, run / "checkpoints" / "last.ckpt")
    assert fit("--resume=run", "--trainer.max_epochs=3") == 2
    err = capfd.readouterr().err
    assert "last.ckpt is of another version of this package" in err and err.count("\n") == 1


def test_seeds_of_ones_own(
    fit: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a module sets by rank counts; without a seed every run draws another one."""

    def weights(rank: int, *args: str) -> Any:
        monkeypatch.setenv("RANK_OF_TEST", str(rank))
        name = f"run_{len(list(tmp_path.glob('run_*')))}"
        short = ("--trainer.devices=1", "--trainer.max_epochs=1", f"--run_dir={name}")
        assert fit(*short, *args) == 0
        return last(tmp_path / name)["state_dict"]

    by_rank = "--trainer.callbacks+=own_run.SeedsByRank"
    first = weights(0, by_rank)
    assert equal(weights(0, by_rank), first) and not equal(weights(1, by_rank), first)
    unseeded = weights(0, "--seed_everything=false")
    assert not equal(weights(0, "--seed_everything=false"), unseeded)
    config = yaml.safe_load((tmp_path / "run_3" / "config.yaml").read_text())
    assert equal(weights(0, f"--seed_everything={config['seed_everything']}"), unseeded)


# which draws no random numbers
PLAIN = ("--trainer.devices=1", "--trainer.max_epochs=2", "--model=LeNet")
KEEP_ALL = "--checkpoint.save_top_k=-1"


def test_after_lightnings_own_checkpoint_the_next_batch_comes(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """Within an epoch: of every few steps, or made when SLURM signals that the time is up."""
    assert fit(*PLAIN, "--checkpoint.every_n_train_steps=5", KEEP_ALL, "--run_dir=whole") == 0
    (path,) = (tmp_path / "whole" / "checkpoints").glob("*step=10.ckpt")  # of 7 steps an epoch
    assert fit(*PLAIN, f"--ckpt_path={path}", "--run_dir=on") == 0
    assert fit(*PLAIN, "--run_dir=slurm", stop="1,4") == 1
    shutil.copy(path, tmp_path / "slurm" / "hpc_ckpt_1.ckpt")
    assert fit("--resume=slurm") == 0
    assert "ckpt:     slurm/hpc_ckpt_1.ckpt" in capfd.readouterr().out
    shutil.copytree(tmp_path / "slurm", tmp_path / "again")
    (tmp_path / "again" / "checkpoints" / "last.ckpt").unlink()
    assert fit("--resume=again", "--trainer.max_epochs=3", stop="2,1") == 1
    assert last(tmp_path / "again")["epoch"] == 2  # the epoch in which it was resumed is kept
    whole, *others = (last(tmp_path / run) for run in ("whole", "on", "slurm"))
    for other in others:
        assert equal(other["state_dict"], whole["state_dict"]) and other["global_step"] == 14


def test_after_the_best_checkpoint_the_next_epoch_comes(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """Also with `max_steps`, with which Lightning goes on within an epoch that is over."""
    args = (*PLAIN, "--trainer.max_epochs=4", "--trainer.max_steps=14", KEEP_ALL)
    assert fit(*args, "--run_dir=whole") == 0
    (path,) = (tmp_path / "whole" / "checkpoints").glob("*step=7.ckpt")
    assert fit(*args, f"--ckpt_path={path}", "--run_dir=on") == 0
    whole, on = (last(tmp_path / run) for run in ("whole", "on"))
    assert equal(on["state_dict"], whole["state_dict"])
    assert equal(on["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"], 2)


def test_a_checkpoint_after_the_last_step_of_an_epoch_is_refused(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    assert fit(*PLAIN, "--checkpoint.every_n_train_steps=7", KEEP_ALL, "--run_dir=a") == 0
    (path,) = (tmp_path / "a" / "checkpoints").glob("*step=7.ckpt")
    assert fit(*PLAIN, f"--ckpt_path={path}", "--run_dir=b") == 2
    assert "after the last step of an epoch" in capfd.readouterr().err


def test_a_loader_without_a_state_is_refused(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    args = (*RUN, "--data=own_run.Shuffled", "--trainer.devices=1", "--trainer.max_epochs=1")
    assert fit(*args, "--checkpoint.every_n_train_steps=3", KEEP_ALL, "--run_dir=a") == 0
    (path,) = (tmp_path / "a" / "checkpoints").glob("*step=3.ckpt")
    capfd.readouterr()
    assert fit(*args, f"--ckpt_path={path}", "--run_dir=b") == 2
    err = capfd.readouterr().err
    assert "the data loader cannot tell which batches are left" in err and err.count("\n") <= 2


@pytest.mark.parametrize("option", ["checkpoint.save_last", "trainer.enable_checkpointing"])
def test_a_run_without_a_last_checkpoint_is_not_trained_again(
    option: str, fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    assert fit(*PLAIN, f"--{option}=false", "--run_dir=a", stop="1,1") == 1
    assert "stopped; it saves no last.ckpt\n" in capfd.readouterr().out
    before = metrics(tmp_path / "a")
    assert fit("--resume=a") == 2
    assert f"--resume=a: with --{option}=false" in capfd.readouterr().err
    assert metrics(tmp_path / "a") == before


def test_half_of_an_accumulated_batch_is_refused(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """Its gradients are in no checkpoint. The next one, after whole steps, is taken."""
    args = (*PLAIN, "--trainer.accumulate_grad_batches=2", "--trainer.val_check_interval=3")
    assert fit(*args, KEEP_ALL, "--run_dir=a") == 0
    half, whole = sorted((tmp_path / "a" / "checkpoints").glob("epoch=0-step=[13].ckpt"))
    assert fit(*args, f"--ckpt_path={half}", "--run_dir=b") == 2
    assert "saved after 3 batches of an epoch, within the 2 of" in capfd.readouterr().err
    assert fit(*args, f"--ckpt_path={whole}", "--run_dir=c") == 0
    assert equal(last(tmp_path / "c")["state_dict"], last(tmp_path / "a")["state_dict"])


def test_a_run_that_max_steps_ended_is_refused(fit: Callable[..., int], capfd: Any) -> None:
    assert fit("--trainer.devices=1", "--trainer.max_steps=3", "--run_dir=a") == 0
    assert fit("--resume=a", "--trainer.max_steps=20") == 2
    assert "the run ended within an epoch" in capfd.readouterr().err


EARLY = ("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_mine")


def test_a_run_that_stopped_by_itself_is_finished(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """It is tested again, and trains no further epoch, however many it is given."""
    assert fit(*PLAIN[:1], "--trainer.max_epochs=9", *EARLY, "--run_dir=a") == 0
    out, before = capfd.readouterr().out.splitlines(), last(tmp_path / "a")
    assert "stopped early: val_mine has not improved for 3 epochs" in out and before["epoch"] == 4
    assert fit("--resume=a", "--trainer.max_epochs=20") == 0
    again = capfd.readouterr().out.splitlines()
    assert "stopped early: val_mine has not improved for 3 epochs" in again
    assert again[-2] == out[-2] and again[-1].split(",")[0] == out[-1].split(",")[0]
    assert not any(line.startswith("epoch ") for line in again)


def test_what_a_callback_has_thawed_stays_so(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """A checkpoint that cannot say what that is, such as a plain Trainer's, is refused."""
    tuned = ("--model=own_run.Tuned", "--trainer.devices=1", "--trainer.max_epochs=4")
    callbacks = (
        "--trainer.callbacks=BackboneFinetuning",
        "--trainer.callbacks.unfreeze_backbone_at_epoch=1",
        "--trainer.callbacks+=own_run.Stop",
    )
    args = (*tuned, *callbacks, "--trainer.accelerator=cpu")
    assert fit(*args, "--run_dir=whole") == 0
    assert fit(*args, "--run_dir=stopped", stop="3,1") == 1
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    foreign = last(tmp_path / "whole")
    del foreign["lightning_mgpu"]
    torch.save(foreign, tmp_path / "foreign.ckpt")
    capfd.readouterr()
    assert fit(*args, "--ckpt_path=foreign.ckpt", "--run_dir=on", "--trainer.max_epochs=5") == 2
    err = capfd.readouterr().err
    assert "does not say what BackboneFinetuning has thawed" in err
