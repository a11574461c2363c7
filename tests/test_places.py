"""Where a run's files go: one directory, however it is written, and no other run's."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lightning_mgpu

CPU = "--trainer.accelerator=cpu"


@pytest.mark.slow
def test_a_home_directory_is_found_behind_an_equals_sign(
    main: Callable, root: Path, tmp_path: Path, run_files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "x.yaml").write_text("trainer: {max_epochs: 1, limit_test_batches: 0}\n")
    data = (f"--data.root={root}", "--data.val_size=101", CPU)
    assert main("fit", *data, "--config=~/x.yaml", "--run_dir=~/a", "--checkpoint.dirpath=~/kept") == 0
    assert main("fit", "--resume=~/a", "--trainer.max_epochs=2") == 0
    assert main("fit", *data, "--config=~/x.yaml", "--trainer.default_root_dir=~/b") == 0
    assert main("test", *data, "--ckpt_path=~/kept/last.ckpt", "--run_dir=~/c") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["a", "b", "c", "kept", "x.yaml"]
    (run,) = (tmp_path / "home" / "b").iterdir()
    assert {path.name for path in run.iterdir()} == run_files - {"predictions.png", "confusion.png"}  # of the test


@pytest.mark.slow
def test_two_runs_do_not_share_checkpoints(
    main: Callable, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    once = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_test_batches=1")
    run = (f"--data.root={root}", "--data.val_size=101", CPU, *once, "--checkpoint.dirpath=kept")
    assert main("fit", *run, "--run_dir=a") == 0
    before = (tmp_path / "kept" / "last.ckpt").read_bytes()
    capfd.readouterr()
    for path in ("kept", f"file://{tmp_path}/kept"):
        assert main("fit", *run, f"--checkpoint.dirpath={path}", "--run_dir=b") == 2
        assert f"--checkpoint.dirpath={path} holds checkpoints of another run" in capfd.readouterr().err
    assert (tmp_path / "kept" / "last.ckpt").read_bytes() == before and not (tmp_path / "b").exists()
    assert main("test", *run, "--ckpt_path=kept/last.ckpt") == 0  # saves none
    assert main("fit", "--resume=a", "--trainer.max_epochs=2") == 0


WITHOUT_CONFIGS = """
from lightning_mgpu.callbacks import LearningCurve
from lightning_mgpu.__main__ import main
main()
"""


def test_the_package_is_copied_without_its_configs(tmp_path: Path) -> None:
    shutil.copytree(Path(lightning_mgpu.__file__).parent, tmp_path / "lightning_mgpu")
    for args in (["fit", "--config=model/lenet.yaml"], ["fit", "--trainer.fast_dev_run=1"]):
        line = [sys.executable, "-c", WITHOUT_CONFIGS, *args]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        told = f"no configurations are in {tmp_path / 'lightning_mgpu' / 'configs'}: copy configs/ of the project there"
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
