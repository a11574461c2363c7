"""Callbacks, loggers and checkpoints can be set, replaced and left out, each by one flag."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mgpu.cli.main import lightning_log_handlers, restoring_process
from lightning_mgpu.cli.training_cli import CALLBACKS

OWN = """
from lightning_mgpu.callbacks import LearningCurve

class Curve(LearningCurve):
    def __init__(self, color: str = "red", **kwargs) -> None:
        super().__init__(**kwargs)
        self.color = color

    def on_fit_end(self, trainer, pl_module) -> None:
        print("drawn in", self.color, self.max_panels)
"""


@pytest.fixture
def fit(main: Callable, root: Path) -> Callable[..., int]:
    cpu = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1")
    data = (f"--data.root={root}", "--data.val_size=101", "--run_dir=run")
    return lambda *args: main("fit", *cpu, *data, *args)


def test_each_callback_goes_by_one_flag(
    fit: Callable[..., int], main: Callable, tmp_path: Path, capfd: Any
) -> None:
    off = [f"--{name}=false" for name in CALLBACKS]
    assert fit(*off) == 0
    out = capfd.readouterr().out
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files >= {"config.yaml", "metrics.csv", "checkpoints"}
    assert not files & {"curve.png", "confusion.png", "predictions.png"}
    assert not any(line.lower().startswith(("model:", "epoch ")) for line in out.splitlines())
    assert out.splitlines()[-1].startswith("test acc: ") and "trained on [" in out
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "train_loss" in header and not {"epoch_seconds", "lr-SGD"} & {*header}
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert not any(config[name] for name in CALLBACKS)
    (tmp_path / "null.yaml").write_text("pictures: null\n")  # as false
    null = ("--config=null.yaml", "--curve=null")
    again = ("--config=run/config.yaml", *null, "--header.class_path=RunHeader", "--run_dir=again")
    assert main("fit", *again) == 0
    assert "model:    LeNet" in capfd.readouterr().out
    assert not (tmp_path / "again" / "curve.png").exists()


def test_a_run_is_resumed_without_a_callback_that_ended_it(
    fit: Callable[..., int], main: Callable, tmp_path: Path, capfd: Any
) -> None:
    broken = "\n    def on_train_epoch_end(self, *args) -> None:\n        raise KeyError\n"
    (tmp_path / "own_curve.py").write_text(OWN + broken)
    with pytest.raises(KeyError):
        fit("--curve=own_curve.Curve")
    off = [f"--{name}=false" for name in CALLBACKS]
    assert main("fit", "--resume=run", *off) == 0
    assert "trained on [" in capfd.readouterr().out


def test_another_class_takes_the_place_of_one(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "own_curve.py").write_text(OWN)
    assert fit("--curve=own_curve.Curve", "--curve.color=blue", "--curve.max_panels=1") == 0
    assert "drawn in blue 1\n" in capfd.readouterr().out
    assert fit("--curve=LearningRateMonitor", "--run_dir=other") == 2
    assert "--curve=LearningRateMonitor" in capfd.readouterr().err


def test_without_checkpoints_and_without_loggers(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """As in Lightning: the first leaves no checkpoint of any kind, the second no logged value."""
    assert fit("--trainer.enable_checkpointing=false", "--trainer.logger=false") == 0
    assert "testing the last epoch: no checkpoints are saved\n" in capfd.readouterr().out
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "config.yaml" in files and not files & {"checkpoints", "metrics.csv", "hparams.yaml"}


def test_what_a_command_changes_in_its_process_is_put_back() -> None:
    def state() -> list[Any]:
        filters = [handler.filters[:] for handler in lightning_log_handlers()]
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        environment = dict(os.environ)
        return [sys.argv[:], sys.path[:], environment, warnings.filters[:], filters, handlers]

    before = state()
    with restoring_process():
        sys.argv.append("x")
        sys.path.append("x")
        os.environ["A_NEW_ONE"] = os.environ.pop("PATH")
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for handler in lightning_log_handlers():
            handler.addFilter(lambda record: False)
        assert state() != before
    assert state() == before
