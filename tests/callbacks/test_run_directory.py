"""Where a run's files go, and nothing in a fast_dev_run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_mgpu.callbacks import (
    EpochTimer,
    LearningCurve,
    PredictionGrid,
    PredictionWriter,
    RunCheckpoint,
    RunHeader,
    run_directory,
)
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.directory import RUN_DIR


def test_fast_dev_run_writes_nothing(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, files: Callable
) -> None:
    callbacks = [RunHeader(), EpochTimer(), LearningCurve(), PredictionGrid(), PredictionWriter()]
    trainer = make_trainer(fast_dev_run=True, callbacks=callbacks)
    data, model = make_data(), LeNet()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data)
    assert run_directory(trainer) is None and files(tmp_path) == set()


def test_run_directory_is_the_loggers(make_trainer: Callable, tmp_path: Path) -> None:
    trainer = make_trainer(logger=CSVLogger(tmp_path / "logs", name="", version=""))
    assert run_directory(trainer) == tmp_path / "logs" and (tmp_path / "logs").is_dir()


def test_run_directory_is_the_command_lines_whatever_the_logger(
    make_data: Callable, make_trainer: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit() -> tuple[Path | None, str | None]:
        checkpoint = RunCheckpoint()
        trainer = make_trainer(
            logger=CSVLogger(tmp_path / "logs", name="", version=""),
            callbacks=[checkpoint],
            default_root_dir=tmp_path / "run",
            enable_checkpointing=True,
        )
        trainer.fit(LeNet(), make_data())
        return run_directory(trainer), checkpoint.dirpath

    assert fit() == (tmp_path / "logs", str(tmp_path / "logs" / "checkpoints"))
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    assert fit() == (tmp_path / "run", str(tmp_path / "run" / "checkpoints"))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file() and (tmp_path / "logs" / "metrics.csv").is_file()
