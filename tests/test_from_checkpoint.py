"""A checkpoint alone is enough for test, validate and predict, and for training on; flags against it are not lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_mgpu.checkpoint_io import KEY
from lightning_mgpu.from_checkpoint import disagreements, saved_config, scaled_by

CPU = "--trainer.accelerator=cpu"
BRIEF = ("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--trainer.max_epochs=1")
MODEL = ("--model.optimizer=AdamW", "--model.optimizer.lr=0.01", "--model.num_classes=11")
DATA = ("--data.normalize=true", "--data.val_size=99", "--data.batch_size=50", "--seed_everything=7")
LAST = "run/checkpoints/last.ckpt"


@pytest.fixture
def trained(main: Callable[..., int], root: Path, capfd: pytest.CaptureFixture) -> Callable[..., int]:
    """The command line after a run whose settings are not the defaults."""
    assert main("fit", CPU, *BRIEF, *MODEL, *DATA, f"--data.root={root}", "--run_dir=run") == 0
    capfd.readouterr()
    return main


@pytest.mark.slow
def test_no_flag_is_repeated(trained: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    for subcommand in ("test", "validate", "predict"):
        assert trained(subcommand, CPU, f"--data.root={root}", "--ckpt_path", LAST, f"--run_dir={subcommand}") == 0
        config = yaml.safe_load((tmp_path / subcommand / "config.yaml").read_text())
        assert config["model"]["init_args"]["num_classes"] == 11
        data = config["data"]["init_args"]
        assert data["normalize"] is True and data["val_size"] == 99 and data["batch_size"] == 50
        assert config["seed_everything"] == 7  # which draws the validation set
        assert f"ckpt:     {LAST}\n" in capfd.readouterr().out


@pytest.mark.slow
def test_flags_of_the_data_win_and_are_told(trained: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    flags = ("--data.normalize=false", "--data.batch_size=50")
    assert trained("test", CPU, f"--data.root={root}", "--ckpt_path", LAST, *flags) == 0
    assert f"ckpt:     {LAST}; data.normalize True -> False\n" in capfd.readouterr().out


@pytest.mark.slow
def test_flags_of_the_model_are_refused(
    trained: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    for flags, told in {
        ("--model.num_classes=10",): "--model.num_classes=10 disagrees with",
        ("--model.optimizer.lr=0.5",): "--model.optimizer.lr=0.5 disagrees with",
        ("--model.optimizer=SGD", "--model.optimizer.lr=0.01"): "--model.optimizer=torch.optim.SGD disagrees with",
        ("--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1"): "--model.lr_scheduler",
    }.items():
        for subcommand in ("fit", "test"):
            assert trained(subcommand, CPU, f"--data.root={root}", "--ckpt_path", LAST, *flags) == 2
            err = capfd.readouterr().err
            assert told in err and "leave the flag out" in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    same = ("--model.num_classes=11", "--model.optimizer.lr=0.01")
    assert trained("test", CPU, f"--data.root={root}", "--ckpt_path", LAST, *same) == 0


@pytest.mark.slow
def test_a_runs_configuration_repeats_it(trained: Callable, root: Path, tmp_path: Path) -> None:
    assert trained("fit", "--config=run/config.yaml", "--run_dir=again") == 0
    assert (tmp_path / "again" / "config.yaml").read_text() == (tmp_path / "run" / "config.yaml").read_text()
    for subcommand in ("test", "validate", "predict"):  # which have no --resume
        args = ("--config=run/config.yaml", "--ckpt_path", LAST, f"--run_dir={subcommand}")
        assert trained(subcommand, *args) == 0


@pytest.mark.slow
def test_a_configuration_with_a_device_repeats_its_run(main: Callable[..., int], root: Path, tmp_path: Path) -> None:
    swa = ("--trainer.callbacks=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.01")
    assert main("fit", CPU, *BRIEF, *swa, "--data.val_size=9", f"--data.root={root}", "--run_dir=run") == 0
    assert main("fit", "--config=run/config.yaml", "--run_dir=again") == 0
    assert (tmp_path / "again" / "config.yaml").read_text() == (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_training_on(trained: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    more = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=2", "--run_dir=more")
    assert trained("fit", CPU, f"--data.root={root}", f"--ckpt_path={LAST}", *more) == 0
    out = capfd.readouterr().out
    assert "epoch 2/2" in out and "epoch 1/2" not in out
    assert saved_config(Path("more/checkpoints/last.ckpt"))["model"] == saved_config(Path(LAST))["model"]


def test_a_file_names_the_checkpoint(main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    data = (CPU, f"--data.root={root}")
    assert main("fit", *data, *BRIEF, "--data.val_size=99", "--model.optimizer=AdamW", "--run_dir=run") == 0
    (tmp_path / "y.yaml").write_text(f"ckpt_path: {LAST}\n")
    capfd.readouterr()
    assert main("test", *data, "--config=y.yaml") == 0, capfd.readouterr().err
    assert f"ckpt:     {LAST}\n" in capfd.readouterr().out


def test_a_checkpoint_of_lightnings_own(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {"_class_path": "a.B", "width": 3}}, path)
    assert saved_config(path) == {"model": {"class_path": "a.B", "init_args": {"width": 3}}}
    torch.save({"state_dict": {}}, path)
    assert saved_config(path) == {}
    assert disagreements(str(path), {"model": {"class_path": "a.B"}}) == []


@pytest.mark.parametrize("zipped", [True, False])
def test_a_configuration_is_found_without_reading_the_weights(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = tmp_path / "x.ckpt", {"model": {"class_path": "LeNet"}}
    content = {"state_dict": {"w": torch.zeros(9)}, KEY: {"config": config, "scaled_by": 2}}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    load, mapped = torch.load, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        mapped.append(kwargs.get("mmap", False))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    assert saved_config(path) == config and scaled_by(path) == 2
    assert mapped == ([True, True] if zipped else [True, False, True, False])  # files before torch 1.6 are no archives


def test_settings_of_a_machine_stay_there(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    data = {"class_path": "D", "init_args": {"root": "/scratch/me", "num_workers": 3, "pin_memory": True, "size": 1}}
    torch.save({"state_dict": {}, "lightning_mgpu": {"config": {"data": data}}}, path)
    assert saved_config(path)["data"] == {"class_path": "D", "init_args": {"size": 1}}


@pytest.mark.slow
def test_how_a_model_is_evaluated_may_change(trained: Callable, root: Path, capfd: pytest.CaptureFixture) -> None:
    views = ["--model.flip_tta=true", "--model.shift_tta=true"]
    assert trained("test", CPU, f"--data.root={root}", "--ckpt_path", LAST, *views) == 0
    changed = "model.flip_tta False -> True; model.shift_tta False -> True"
    assert f"ckpt:     {LAST}; {changed}\n" in capfd.readouterr().out


def test_ways_of_evaluation_that_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    model = {"class_path": "a.B", "init_args": {"width": 3}}
    torch.save({"state_dict": {}, "lightning_mgpu": {"config": {"model": model}}}, path)
    for is_asked, said in ((True, ["model.shift_tta null -> True"]), (False, [])):
        given = {"class_path": "a.B", "init_args": {"width": 3, "shift_tta": is_asked}}
        assert disagreements(str(path), {"model": given}) == said


SECRET = "https://me:hunter2@host/x"
WITH_URL = """
from lightning_mgpu.data import FashionMNIST

class Remote(FashionMNIST):
    def __init__(self, url: str, root: str) -> None:
        super().__init__(root=root, batch_size=50, val_size=9)
        assert "hunter2" in url
"""


@pytest.mark.slow
def test_a_secret_is_given_again(
    main: Callable[..., int], root: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "remote_data.py").write_text(WITH_URL)
    monkeypatch.syspath_prepend(tmp_path)
    data, url = ("--data=remote_data.Remote", f"--data.root={root}"), f"--data.url={SECRET}"
    assert main("fit", CPU, *BRIEF, *data, url, "--run_dir=run") == 0
    for args in (("fit", "--resume=run"), ("test", CPU, f"--data.root={root}", "--ckpt_path", LAST)):
        assert main(*args, url) == 0
        out = capfd.readouterr().out
        assert f"ckpt:     {LAST}\n" in out and "hunter2" not in out
        assert main(*args) == 2
        assert "--data.url=https://***@host/x: a secret, which is written to no file" in capfd.readouterr().err
