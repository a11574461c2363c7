"""A stopped run ends like one that never stopped: weights, optimizer, metrics, files."""

import json
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_mgpu.runs.directory import lock_run_dir, read_run_json
from tests.runs.conftest import RUN, assert_same, equal, last, metrics

DP = ("--trainer.devices=2", "--trainer.strategy=dp")


def test_stopped_three_times(fit, tmp_path, capfd):
    """By three signals: in the first epoch, in a later one, and while `last.ckpt` is saved."""
    assert fit("--run_dir=whole") == 0
    capfd.readouterr()
    assert fit("--run_dir=stopped", stop="0,3", number="SIGINT") == 130
    assert not (tmp_path / "stopped" / "checkpoints").exists()
    assert fit("--resume=stopped", stop="2,1", number="SIGTERM") == 130
    assert last(tmp_path / "stopped")["epoch"] == 2
    assert fit("--resume=stopped", stop="save,3", number="SIGHUP") == 130
    way_on = "stopped; resume with: python -m lightning_mgpu fit --resume=stopped\n"
    assert way_on in capfd.readouterr().out
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize(
    "options",
    [
        # it has read a value of an earlier epoch
        "--model.schedule=plateau --trainer.check_val_every_n_epoch=2",
        # it has been patient for too long, but must train on
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val_mine "
        "--trainer.callbacks.patience=1 --trainer.min_epochs=3 --trainer.max_epochs=6",
        "--model.schedule=cycle --trainer.accumulate_grad_batches=3",
        "--data=own_run.Shuffled",
    ],
)
def test_what_is_remembered_over_epochs(options, fit, tmp_path):
    assert fit(*options.split(), "--run_dir=whole") == 0
    assert fit(*options.split(), "--run_dir=stopped", stop="2,1") == 130
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_run_stopped_in_its_test_is_tested_again(fit, main, tmp_path, capfd):
    """With the same random numbers, and `test` has them too."""
    assert fit("--run_dir=whole") == 0
    assert fit("--run_dir=stopped", stop="test", number="SIGTERM") == 130
    assert "resume with: " in capfd.readouterr().out
    assert read_run_json(tmp_path / "stopped")["end"]["state"] == "interrupted"
    assert fit("--resume=stopped") == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    (best,) = (tmp_path / "whole" / "checkpoints").glob("epoch=*.ckpt")
    assert main("test", f"--ckpt_path={best}", "--run_dir=tested", *RUN[-3:]) == 0
    drawn = [metrics(tmp_path / name)[-1]["test_drawn"] for name in ("whole", "tested")]
    assert drawn[0] == drawn[1]


def test_a_longer_run_under_another_strategy(own, fit, capfd):
    """Flags that only say how long and where are taken, and equal ones."""
    assert fit("--trainer.max_epochs=2", "--run_dir=run") == 0
    capfd.readouterr()
    before = metrics(run := own / "run")
    equal_ones = ("--model=own_run.Net", "--model.lr=0.10")
    assert fit(f"--resume={run}", *equal_ones, "--trainer.max_epochs=3", *DP) == 0
    out = capfd.readouterr().out
    assert f"ckpt:     {run}/checkpoints/last.ckpt" in out
    assert "epoch 3/3" in out and "epoch 2/" not in out
    assert metrics(run)[: len(before) - 1] == before[:-1]  # but the test at the end
    assert len(list((run / "checkpoints").iterdir())) == 2
    assert fit("--resume=run") == 0  # finished: tested once more, and nothing else
    assert "epoch 3/3" not in capfd.readouterr().out
    assert [bool(row["test_acc"]) for row in metrics(run)].count(True) == 1


def test_the_newest_run(fit, tmp_path, capfd):
    """The newest one that can be resumed. The newer ones are listed, with the reasons."""
    assert fit("--resume=last") == 2
    assert "--resume=last: no run in runs/ can be resumed" in capfd.readouterr().err
    assert fit("--trainer.max_epochs=1") == 0
    assert fit("--trainer.max_epochs=2", stop="0,1") == 130
    (stopped,) = [run for run in tmp_path.glob("runs/*") if not (run / "curve.png").exists()]
    assert fit("--trainer.max_steps=3", "--run_dir=runs/short") == 0
    assert fit("--trainer.enable_checkpointing=false", "--run_dir=runs/none", stop="1,1") == 130
    for command in ("test", "fit"):  # newer, but nothing to resume with: a test, a refused start
        (other := tmp_path / "runs" / command).mkdir()
        (other / "run.json").write_text(f'{{"command": "x.py {command}", "end": {{}}}}')
        (other / "config.yaml").touch()
    (tmp_path / "runs" / "test" / "model.txt").touch()
    capfd.readouterr()
    assert fit("--resume=last") == 0
    none, short, taken = capfd.readouterr().out.splitlines()[:3]
    skipped = "--resume=last: skipped: --resume=runs"
    assert none == f"{skipped}/none: it saved no checkpoint (enable_checkpointing)"
    assert short.startswith(f"{skipped}/short: the run finished without a last.ckpt: use `test ")
    assert taken == f"--resume=last: runs/{stopped.name}"
    assert read_run_json(stopped)["end"]["epochs"] == 2


@pytest.mark.parametrize("where", ["sanity", "setup"])
def test_a_run_that_has_not_begun_leaves_nothing(where, fit, tmp_path, capfd):
    """Where a kill has left a file that is not finished, `start again` is true as well."""
    (tmp_path / "a").mkdir()
    (others := tmp_path / "others.txt").write_text("trai")
    (tmp_path / "a" / ".part.config.yaml").symlink_to(others)
    line = ("--trainer.max_epochs=1", "--run_dir=a")
    assert fit(*line, stop=where, number="SIGTERM") == 130
    assert "stopped; start again\n" in capfd.readouterr().out
    assert not (tmp_path / "a").exists() and others.read_text() == "trai"


@pytest.mark.parametrize(
    "options",
    [
        "--trainer.callbacks+=StochasticWeightAveraging --trainer.callbacks.swa_lrs=0.1",
        "--model=own_run.Lambda --model.tag=a",
    ],
)
def test_what_no_yaml_says_by_itself(options, fit, main, tmp_path):
    """Defaults that cannot be written count again."""
    assert fit(*options.split(), "--run_dir=a", "--trainer.max_epochs=2") == 0
    assert "Unable to serialize" not in (tmp_path / "a" / "config.yaml").read_text()
    assert fit(*options.split(), "--run_dir=b", "--trainer.max_epochs=2", stop="1,1") == 130
    assert fit("--resume=b") == 0
    assert_same(tmp_path / "a", tmp_path / "b")
    assert main("test", "--ckpt_path=a/checkpoints/last.ckpt", "--run_dir=c") == 0


def test_lightnings_finders(fit, tmp_path, capfd):
    """The run is one with the rate found; its own steps are not the run's. It is not resumed."""
    finder = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.attr_name=rate")
    search = (*finder, "--trainer.callbacks.num_training_steps=8", "--trainer.max_epochs=2")
    assert fit(*search, "--run_dir=found") == 0
    out = capfd.readouterr().out
    assert "\nepoch 1/2 " in out and "ckpt:" not in out
    rate = next(row["lr-SGD"] for row in metrics(tmp_path / "found") if row["lr-SGD"])
    assert fit(f"--model.lr={rate}", "--trainer.max_epochs=2", "--run_dir=given") == 0
    assert equal(last(tmp_path / "found")["state_dict"], last(tmp_path / "given")["state_dict"])
    before = (tmp_path / "found" / "run.json").read_text()
    assert fit("--resume=found") == 2
    err = capfd.readouterr().err
    assert "--resume: a LearningRateFinder would search again" in err and err.count("\n") == 1
    assert (tmp_path / "found" / "run.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ("--model.lr=0.3", "--model.lr=0.3: must be 0.1, as in run"),
        ("--trainer.callbacks+=DeviceStatsMonitor", "must be None, as in run"),
        ("--run_dir=run", "--run_dir=run: must be None, as in run: remove the option"),
        (
            "--ckpt_path=run/checkpoints/last.ckpt",
            "--ckpt_path: not an option of `fit`: use --res",
        ),
        ("--trainer.max_epochs=1", "--trainer.max_epochs=1: run has 2 epochs"),
    ],
)
def test_mistakes_leave_the_run_as_it_is(options, hint, run, fit, capfd):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert fit("--resume=run", *options.split()) == 2
    err = capfd.readouterr().err
    assert hint in err and err.count("\n") == 1
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_damaged_run_is_refused(run, fit, capfd, monkeypatch):
    """A flipped bit, half a file, code in a file, another version, a lock."""

    def error_of(*args):
        assert fit("--resume=run", "--trainer.max_epochs=3", *args) == 2
        err = capfd.readouterr().err
        assert err.count("\n") <= 6, err
        return str(err)

    path = run / "checkpoints" / "last.ckpt"
    good, content = path.read_bytes(), last(run)
    middle = len(good) // 2
    flipped = bytes([*good[:middle], good[middle] ^ 1, *good[middle + 1 :]])
    for torn in (flipped, good[:-7], b""):
        path.write_bytes(torn)
        assert "last.ckpt cannot be read: damaged" in error_of()
    torch.save({**content, "hyper_parameters": Pwned()}, path)
    assert "or with objects that torch.load considers unsafe" in error_of()
    torch.save({**content, "lightning_mgpu": {"streams": 1}}, path)
    assert "last.ckpt is of a different version" in error_of()
    torch.save({**content, "optimizer_states": []}, path)
    assert "last.ckpt contains 0 optimizer states, but the model has 1: start a" in error_of()
    states = {**content["optimizer_states"][0]}
    states["param_groups"] = 2 * states["param_groups"]
    torch.save({**content, "optimizer_states": [states]}, path)
    assert "error: loaded state dict has a different number of parameter groups" in error_of()
    path.write_bytes(good)
    with monkeypatch.context() as patch:  # the first process has found no checkpoint
        patch.setattr(SingleDeviceStrategy, "broadcast", lambda _, x, *src: x is not True and x)
        assert "only some machines have the run's last.ckpt: use a shared" in error_of()
    rows = (run / "metrics.csv").read_text()
    for broken in (rows.replace(",step,", ",stp,"), rows.replace(",6,", ",six,")):
        (run / "metrics.csv").write_text(broken)
        assert "metrics.csv: step and seconds must be columns of numbers" in error_of()
    (run / "metrics.csv").write_text(rows)
    lock = lock_run_dir(run)
    assert "run is still running" in error_of()
    os.close(lock)


class Pwned:
    def __reduce__(self):
        return print, ("code of a checkpoint runs",)


def test_a_finished_run_without_a_whole_epoch_is_not_trained_again(fit, run, tmp_path, capfd):
    """Also where somebody has deleted its last checkpoint. A run of no epoch starts with one."""
    assert fit("--trainer.max_steps=3", "--run_dir=a") == 0
    content = {path: path.read_bytes() for path in Path("a").rglob("*") if path.is_file()}
    for options in ((), ("--trainer.max_steps=10",)):
        assert fit("--resume=a", *options) == 2
        end = "a/checkpoints/end.ckpt"
        use = f"without a last.ckpt: use `test --ckpt_path={end}` or `fit --weights={end}`"
        assert use in capfd.readouterr().err
    assert all(path.read_bytes() == content[path] for path in content)
    (run / "checkpoints" / "last.ckpt").unlink()
    assert fit("--resume=run") == 2
    assert "run: the run finished without a last.ckpt: start a new run" in capfd.readouterr().err
    assert fit("--trainer.max_epochs=0", "--run_dir=b") == 0
    assert fit("--resume=b", "--trainer.max_epochs=1") == 0
    assert last(tmp_path / "b")["epoch"] == 1


def test_no_file_is_written_through_a_link(fit, run, own):
    (others := own / "others.txt").write_text("mine")
    for name in ("model.txt", "metrics.csv", "run.json", "config.yaml", "curve.png"):
        (run / name).rename(run / f"old_{name}")
        (run / name).symlink_to(others if name in ("model.txt", "curve.png") else f"old_{name}")
    kept = {path: path.read_bytes() for path in (others, *run.glob("old_*"))}
    assert fit("--resume=run", "--trainer.max_epochs=3") == 0
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_a_run_that_ends_within_an_epoch_goes_on_from_the_last_whole_one(fit, tmp_path):
    assert fit("--trainer.max_steps=10", "--run_dir=a") == 0  # of 7 in an epoch
    names = {path.name for path in (tmp_path / "a" / "checkpoints").iterdir()}
    assert {"last.ckpt", "end.ckpt"} < names and last(tmp_path / "a")["global_step"] == 7
    assert fit("--resume=a", "--trainer.max_steps=14") == 0
    assert not (tmp_path / "a" / "checkpoints" / "end.ckpt").exists()
    assert fit("--trainer.max_steps=14", "--run_dir=b") == 0
    assert equal(last(tmp_path / "a")["state_dict"], last(tmp_path / "b")["state_dict"])


def test_a_run_that_stopped_by_itself_is_finished(fit, tmp_path, capfd):
    """It is tested again, and trains no further epoch, however many it is given."""
    early = ("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_mine")
    assert fit("--trainer.max_epochs=9", *early, "--run_dir=a") == 0
    out = capfd.readouterr().out.splitlines()
    (hint,) = [line for line in out if line.startswith("stopped early: Monitored metric val_mine")]
    assert last(tmp_path / "a")["epoch"] == 4
    assert json.loads((tmp_path / "a" / "run.json").read_text())["end"]["state"] == "stopped"
    assert fit("--resume=a", "--trainer.max_epochs=20") == 0
    again = capfd.readouterr().out.splitlines()
    assert hint in again and again[-2] == out[-2]
    assert again[-1].split(",")[0] == out[-1].split(",")[0]
    assert not any(line.startswith("epoch ") for line in again)
    assert fit("--resume=a", "--trainer.callbacks.patience=5") == 2
    assert "--trainer.callbacks.0.patience=5: must be 3, as in a" in capfd.readouterr().err
