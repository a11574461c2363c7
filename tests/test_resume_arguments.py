"""What stands beside `--resume`, and what a run says of how it is resumed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lightning_mgpu.errors import UsageError
from lightning_mgpu.resume import choose_checkpoint, find_run, how_to_resume


@pytest.mark.slow
@pytest.mark.parametrize("given", ["flag", "file"])
def test_a_run_that_began_with_a_checkpoint_is_resumed(
    given: str, main: Callable[..., int], root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    brief = (f"--data.root={root}", "--data.val_size=101", "--trainer.accelerator=cpu", "--trainer.max_epochs=1")
    assert main("fit", *brief, "--run_dir=a") == 0
    ckpt_path = "a/checkpoints/last.ckpt"
    (tmp_path / "begin.yaml").write_text(f"ckpt_path: {ckpt_path}\n")
    begin = f"--ckpt_path={ckpt_path}" if given == "flag" else "--config=begin.yaml"
    assert main("fit", *brief, "--trainer.max_epochs=2", begin, "--run_dir=b") == 0
    shutil.rmtree(tmp_path / "a")  # `b` has checkpoints of its own
    capfd.readouterr()
    assert main("fit", "--resume=b", "--trainer.max_epochs=3") == 0, capfd.readouterr().err
    out = capfd.readouterr().out
    assert "ckpt:     b/checkpoints/last.ckpt; trainer.max_epochs 2 -> 3\n" in out
    assert "epoch 3/3" in out and "epoch 2/3" not in out
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["ckpt_path"] == ckpt_path
    assert main("fit", "--resume=b", f"--ckpt_path={ckpt_path}") == 2
    assert "leave --ckpt_path out" in capfd.readouterr().err


def test_resume_is_for_the_command_line(main: Callable, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "z.yaml").write_text("resume: last\n")
    assert main("fit", "--config=z.yaml") == 2
    assert "resume: last in a --config file: say --resume=last on the command line" in capfd.readouterr().err


def test_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert how_to_resume(Path("my runs/a[0,1]")) == "python -m lightning_mgpu fit --resume='my runs/a[0,1]'"
    with pytest.raises(UsageError, match=r"fit --config 'my runs/config\.yaml'$"):
        choose_checkpoint(Path("my runs"))


def test_the_newest_run_is_named_for_one_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("b", "c", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
        os.utime(tmp_path / "runs" / name / "config.yaml", (i, i))
    with pytest.raises(UsageError, match=r"no such run directory; the newest here is runs/a$"):
        find_run("nope")
