"""The best checkpoint and the last one, how they are saved, and what else takes them."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_mgpu.runs.checkpoints import AtomicCheckpointIO, BestCheckpoint, read_checkpoint
from lightning_mgpu.runs.directory import read_run_json
from lightning_mgpu.runs.record import fingerprint
from lightning_mgpu.tools import UsageError
from tests.runs.conftest import last, metrics


def test_a_runs_directory(run):
    """The model logs metrics of its own in validation: the best is still that of val_acc."""
    files = {"config.yaml", "run.json", "model.txt", "metrics.csv", "checkpoints"}
    pictures = {"curve.png", "predictions.png", "confusion.png"}
    assert {path.name for path in run.iterdir()} == files | pictures
    values = {int(row["epoch"]): float(row["val_acc"]) for row in metrics(run) if row["val_acc"]}
    (best,) = (run / "checkpoints").glob("epoch=*.ckpt")
    assert best.name.startswith(f"epoch={max(values, key=lambda epoch: (values[epoch], -epoch))}-")
    assert {path.name for path in (run / "checkpoints").iterdir()} == {best.name, "last.ckpt"}
    assert any(row.get("lr-SGD") for row in metrics(run))


def test_the_best_is_tested_and_the_last_has_the_fingerprint(fit, tmp_path, capfd, recwarn):
    best_of = ("--checkpoint.monitor=val_f1", "--checkpoint.mode=max", "--run_dir=a")  # epoch 1's
    assert fit(*best_of) == 0
    out = capfd.readouterr().out.splitlines()
    (best,) = (tmp_path / "a" / "checkpoints").glob("epoch=0-*.ckpt")
    (row,) = [row for row in metrics(tmp_path / "a") if row["test_acc"]]
    assert out[-1].startswith(f"test acc: {float(row['test_acc']):.2f}, ")
    assert out[-1].endswith(" sec/epoch on [device(type='cpu')]")
    weights = last(tmp_path / "a")["state_dict"]
    assert out[-2] == f"fingerprint: {fingerprint(list(weights.values()))}"
    assert f"best checkpoint: {os.path.relpath(best)}" in out
    weights_of_best = torch.load(best, map_location="cpu", weights_only=True)["state_dict"]
    assert not torch.equal(weights["net.1.bias"], weights_of_best["net.1.bias"])
    assert not [each for each in recwarn if "before the ``update`` method" in str(each.message)]


def test_weights_set_when_training_ends_are_in_the_last(fit, tmp_path, capfd):
    """The fingerprint is of weights that a checkpoint has, and the finished run has it again."""
    ema = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.strategy=manual_allreduce")
    assert fit("--trainer.max_epochs=2", "--run_dir=a", *ema) == 0
    printed = capfd.readouterr().out.splitlines()[-2]
    weights = last(tmp_path / "a")["state_dict"]
    assert printed == f"fingerprint: {fingerprint(list(weights.values()))}"
    assert fit("--resume=a") == 0
    assert capfd.readouterr().out.splitlines()[-2] == printed


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (
            "--checkpoint.monitor=val_f1 --checkpoint.mode=max",
            "testing epoch 1: val_f1 1.0000 (largest)",
        ),
        (
            "--checkpoint.monitor=val_error --checkpoint.mode=min",
            "testing epoch 2: val_error 0.9000 (smallest)",
        ),
        ("--checkpoint.monitor=null", "testing epoch 2: the last one saved by --checkpoint"),
        (
            "--checkpoint.monitor=val_other --checkpoint.mode=max",
            "testing the last epoch: --checkpoint.monitor=val_other",
        ),
        (
            "--data.val_size=0",
            "testing the last epoch: no best checkpoint is kept: save_top_k=0",
        ),
    ],
)
def test_which_checkpoint_is_the_best(options, hint, fit, own, capfd, recwarn):
    """It is tested, before and after a resume. The test set does not choose it."""
    assert fit("--trainer.max_epochs=2", *options.split(), "--run_dir=a") == 0
    out = capfd.readouterr().out
    assert f"\n{hint}" in out
    unlogged = "--checkpoint.monitor=val_other was not logged; logged metrics: "
    assert any(unlogged in str(each.message) for each in recwarn) == ("val_other" in options)
    assert fit("--resume=a") == 0
    out = capfd.readouterr().out
    assert hint in out
    assert f" {read_run_json(own / 'a')['end']['metrics']['seconds_per_epoch']:.1f} sec/ep" in out


def test_evaluation_takes_a_checkpoint_alone(run, main, root, capfd):
    (best,) = Path("run/checkpoints").glob("epoch=*.ckpt")
    path = f"--ckpt_path={best}"
    where = (f"--data.root={root}", "--trainer.accelerator=cpu", "--trainer.devices=1")
    assert main("test", path, *where, "--run_dir=tested", "--data.batch_size=9") == 0
    out = capfd.readouterr().out
    assert "Net, 12,730 parameters" in out
    assert f"ckpt:     {best}\n" in out
    losses = [float(metrics(each)[-1]["test_loss"]) for each in (run, run.parent / "tested")]
    assert losses[1] == pytest.approx(losses[0])  # that of the trained weights
    assert main("predict", path, *where, "--run_dir=predicted") == 0
    assert len(list(csv.reader((run.parent / "predicted" / "predictions.csv").open()))) == 108
    assert main("test", path, "--seed_everything=5", "--print_config") == 0
    config = yaml.safe_load(capfd.readouterr().out)
    assert config["seed_everything"] == 5 and config["data"]["init_args"]["batch_size"] == 64
    assert main("validate", "--model=LeNet", path, *where) == 2
    assert "Error(s) in loading state_dict for LeNet" in capfd.readouterr().err
    (run / "mine").mkdir()  # another person's run may be in any directory above it
    moved = (run / "checkpoints" / "last.ckpt").rename(run / "mine" / "last.ckpt")
    assert main("test", f"--ckpt_path={moved}", *where) == 2
    assert "is not in a run directory: add --config=FILE or --model" in capfd.readouterr().err


def test_weights_of_another_run_with_any_settings(run, fit, capfd):
    """Also where the run is stopped in its first epoch; another model's are refused."""
    weights = last(run)["state_dict"]
    start = ("--weights=run/checkpoints/last.ckpt", "--model.lr=0", "--run_dir=tuned")
    assert fit(*start, "--trainer.max_epochs=1", stop="0,1") == 130
    assert fit("--resume=tuned") == 0
    tuned = last(run.parent / "tuned")["state_dict"]
    assert all(torch.equal(tuned[name], weights[name]) for name in weights)
    assert fit("--resume=tuned", "--weights=other.ckpt") == 2
    assert "must be run/checkpoints/last.ckpt, as in tuned" in capfd.readouterr().err
    assert fit(start[0], "--model.width=8", "--run_dir=other") == 2
    assert "Error(s) in loading state_dict for Net" in capfd.readouterr().err
    assert not Path("other").exists()


def test_weights_from_elsewhere(run, fit, own, capfd):
    """A bare state_dict under other names, also in the old format; with a head of another size."""
    (own / "own_more.py").write_text(OWN)
    weights = last(run)["state_dict"]
    bare = {name.removeprefix("net."): value for name, value in weights.items()}
    torch.save(bare, "old.pth", _use_new_zipfile_serialization=False)
    torch.save({f"module.{name}": value for name, value in bare.items()}, "parallel.pth")
    torch.save({**bare, "4.bias": torch.ones(12), "more": torch.ones(1)}, "head.pth")
    torch.save({"fc.bias": torch.ones(10)}, "other.pth")
    start = ("--trainer.max_epochs=1", "--model.lr=0")
    for name, model in (
        ("old", "own_run.Net"),
        ("parallel", "own_run.Net"),
        ("head", "own_more.Loose"),
    ):
        assert fit(*start, f"--model={model}", f"--weights={name}.pth", f"--run_dir={name}") == 0
        trained = last(own / name)["state_dict"]
        different = [name for name in weights if not torch.equal(trained[name], weights[name])]
        assert different == ["net.4.bias"] * (name == "head")
    assert "head.pth: skipped net.4.bias, more\n" in capfd.readouterr().out
    for line, hint in {
        "--weights=head.pth": "Error(s) in loading state_dict for Net",
        "--weights=other.pth --model=own_more.Loose": "other.pth has no matching weights: ['fc",
    }.items():
        assert fit(*start, *line.split(), "--run_dir=refused") == 2
        assert hint in capfd.readouterr().err


def test_a_best_checkpoint_that_is_damaged_or_gone(fit, own, capfd):
    """Or is that of the run that this one was copied from."""
    assert fit("--run_dir=run", "--trainer.max_epochs=1") == 0
    run = own / "run"
    (best,) = (run / "checkpoints").glob("epoch=*.ckpt")
    shutil.copytree(run, "copy")
    assert fit("--resume=copy") == 0
    assert f"last epoch: the best checkpoint {best} was deleted" in capfd.readouterr().out
    best.write_bytes(best.read_bytes()[:-20])
    assert fit("--resume=run") == 2
    err = capfd.readouterr().err
    assert f"{best} cannot be read: damaged" in err and err.count("\n") == 1
    assert read_run_json(run)["end"]["state"] == "failed"
    best.unlink()
    assert fit("--resume=run") == 0
    assert f"last epoch: the best checkpoint {best} was deleted" in capfd.readouterr().out


OWN = """
from own_run import Net

class Loose(Net):
    strict_loading = False
"""


def test_numpy_numbers_are_saved_as_pythons(tmp_path):
    numbers = {"a": [np.float64(0.1), (np.int64(3), np.bool_(True))], "b": {"c": 2}}
    weights = torch.nn.BatchNorm1d(2).state_dict()
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": weights, **numbers}, path)
    saved = read_checkpoint(path)
    assert saved["state_dict"]._metadata == weights._metadata != {}
    found = [saved["a"][0], *saved["a"][1], saved["b"]["c"]]
    assert found == [0.1, 3, True, 2] and [*map(type, found)] == [float, int, bool, int]
    with pytest.raises(UsageError, match="objects of"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "rate": np.float32(0.1)}, path)


def test_what_is_best_must_be_known():
    """A loss falls, an accuracy rises; between validations, their value is an old one."""
    assert BestCheckpoint("val_loss").mode == "min" and BestCheckpoint("val/acc").mode == "max"
    for name in ("val_f1", "val_acc_mae", "val_vaccine_error", "val_glossary_f1"):
        with pytest.raises(ValueError, match=rf"{name}: add --checkpoint\.mode=min or max"):
            BestCheckpoint(name)
    with pytest.raises(
        ValueError, match=r"stale between validations: add --checkpoint\.monitor=null"
    ):
        BestCheckpoint(every_n_train_steps=10)
