"""Seconds until an accuracy: the arithmetic with a clock of our own, and the command."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_mgpu import __version__
from lightning_mgpu.benchmark import runner, time_to_accuracy
from lightning_mgpu.benchmark.time_to_accuracy import AccuracyClock, first_reached, summarise, to_line
from lightning_mgpu.callbacks import EpochTimer, epoch_timer
from lightning_mgpu.models import LeNet


def epochs(*rows: tuple[float, float, float]) -> list[dict[str, float]]:
    names = ("accuracy", "seconds", "seconds_with_validation")
    return [{"epoch": n, **dict(zip(names, row))} for n, row in enumerate(rows, start=1)]


@pytest.mark.parametrize(
    ("validations", "epochs", "seconds"),
    [
        ({}, [1, 2], [7, 14]),
        ({"val_check_interval": 3}, [1, 1, 2, 2], [3, 6, 10, 13]),  # in the middle of an epoch of 7 batches
        ({"check_val_every_n_epoch": 2}, [2], [14]),
    ],
)
def test_clock_stops_for_validation(
    validations: dict[str, int],
    epochs: list[int],
    seconds: list[int],
    make_data: Callable,
    make_trainer: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes 1 s, a validation 200 s, and what others do after it 1000 s."""
    now = 0.0

    class Steps(LeNet):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            nonlocal now
            now += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            nonlocal now
            now += 100
            return super().validation_step(batch, batch_idx)

    class Other(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            nonlocal now
            now += 1000

    for module in (epoch_timer, time_to_accuracy):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = AccuracyClock(str(tmp_path / "clock.json"))
    callbacks = [clock, EpochTimer(), Other()]
    make_trainer(max_epochs=2, num_sanity_val_steps=2, callbacks=callbacks, **validations).fit(Steps(), make_data())
    rows = json.loads((tmp_path / "clock.json").read_text())
    assert rows == clock.epochs and [row["epoch"] for row in rows] == epochs
    assert [row["seconds"] for row in rows] == seconds
    others = [200 + 1200 * i for i in range(len(rows))]
    assert [row["seconds_with_validation"] for row in rows] == [a + b for a, b in zip(seconds, others)]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_a_run_that_goes_on_keeps_its_epochs_and_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped 30 s after its first epoch, which took 10 s, and resumed much later."""
    now = 0.0
    monkeypatch.setattr(time_to_accuracy, "time", SimpleNamespace(perf_counter=lambda: now))
    metrics, timer = {"val_acc": 0.5}, SimpleNamespace(seconds_so_far=8.0)
    monkeypatch.setattr(time_to_accuracy, "EpochTimer", SimpleNamespace)
    about = {"strategy": SimpleNamespace(root_device=torch.device("cpu")), "callback_metrics": metrics}
    trainer: Any = SimpleNamespace(callbacks=[timer], is_global_zero=True, sanity_checking=False, **about)
    before, after = AccuracyClock(str(tmp_path / "clock.json")), AccuracyClock(str(tmp_path / "clock.json"))
    trainer.current_epoch = 0
    before.on_train_start(trainer, LeNet())
    now = 10.0
    before.on_validation_end(trainer, LeNet())
    now = 40.0
    after.load_state_dict(before.state_dict())
    now = 1000.0
    after.on_train_start(trainer, LeNet())
    now, trainer.current_epoch = 1005.0, 1
    after.on_validation_end(trainer, LeNet())
    rows = json.loads((tmp_path / "clock.json").read_text())
    assert [(row["epoch"], row["seconds_with_validation"]) for row in rows] == [(1, 10), (2, 45)]


def test_first_epoch_that_reaches_the_target() -> None:
    rows = epochs((0.8, 1, 2), (0.9, 2, 4), (0.85, 3, 6), (0.95, 4, 8))
    assert first_reached(rows, 0.9) == rows[1]
    assert first_reached(rows, 0.901) == rows[3]
    assert first_reached(rows, 0.96) is None


def test_summary_over_seeds() -> None:
    runs = [
        {"seed": 0, "epochs": epochs((0.8, 1, 2), (0.9, 2, 4))},
        {"seed": 1, "epochs": epochs((0.9, 4, 8), (0.92, 5, 9))},
    ]
    summary = summarise(runs, 0.9)
    assert summary["num_seeds"] == summary["num_reached"] == 2
    assert summary["seconds"] == {"mean": 3, "spread": pytest.approx(2**0.5)}
    assert summary["seconds_with_validation"] == {"mean": 6, "spread": pytest.approx(8**0.5)}
    assert summary["last_accuracy"]["mean"] == pytest.approx(0.91)
    assert to_line(summary, 0.9) == (
        "test accuracy 0.9: 3.0 +- 1.4 s (validation excluded), 6.0 +- 2.8 s (included) over 2 seeds; "
        "accuracy at the end 0.9100 +- 0.0141"
    )


def test_a_seed_that_does_not_reach_it_leaves_no_mean() -> None:
    runs = [{"seed": 0, "epochs": epochs((0.8, 1, 2))}, {"seed": 1, "epochs": epochs((0.9, 4, 8))}]
    summary = summarise(runs, 0.9)
    assert summary["num_reached"] == 1 and "seconds" not in summary
    assert to_line(summary, 0.9).startswith("test accuracy 0.9: reached by 1 of 2 seeds; accuracy at the end 0.85")


@pytest.mark.slow
def test_command(command: Any, main: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    small = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2")
    limits = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))
    args = ("--target=0.01", "--seeds", "3", "--run_dir=tta", *small, *limits)
    code, out, err = command("benchmark", "time_to_accuracy", *args)
    assert code == 0, err
    report = json.loads((tmp_path / "tta" / "time_to_accuracy.json").read_text())
    [run] = report["runs"]
    assert run["seed"] == 3 and [row["epoch"] for row in run["epochs"]] == [1, 2]
    assert report["seconds"]["mean"] == run["epochs"][0]["seconds"] > 0
    assert 0 < run["epochs"][0]["seconds"] < run["epochs"][0]["seconds_with_validation"]
    assert report["machine"]["malloc"] == "default" and report["target"] == 0.01
    assert to_line({**report}, 0.01) in out and "val_size: 0" in (tmp_path / "tta/seed_3/config.yaml").read_text()
    assert main("benchmark", "time_to_accuracy", *args) == 2
    assert "--run_dir=tta exists" in capfd.readouterr().err
    assert main("benchmark", "time_to_accuracy", "--target=0.5", "--run_dir=none", "--model=LeNett") == 2
    assert "did you mean LeNet" in capfd.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_sigterm_ends_the_run_under_way_and_keeps_the_seeds_before(command: Any, tmp_path: Path) -> None:
    small = ("--data.source=synthetic", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2")
    limits = ("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2", "--trainer.limit_test_batches=0.1")
    run_dir = tmp_path / "tta"
    args = ("--target=0.01", "--seeds", "3", "4", f"--run_dir={run_dir}", *small, *limits)
    process = command.start("benchmark", "time_to_accuracy", *args)
    killer = threading.Timer(120, process.kill)
    killer.start()
    while (line := process.stdout.readline()) and "seed_4" not in line:
        pass
    killer.cancel()
    process.terminate()
    code, out, err = command.finish(process, 60)
    assert code == 128 + signal.SIGTERM, err
    assert [run["seed"] for run in json.loads((run_dir / "time_to_accuracy.json").read_text())["runs"]] == [3]
    assert "over 1 seeds" in out
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in commands if bytes(run_dir) in line], "a fit was left behind"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The seeds trained, in a moment; each reaches an accuracy of 0.9 in 2 s."""
    seeds: list[str] = []

    def fake(command: list[str]) -> int:
        given = dict(argument.removeprefix("--").split("=", 1) for argument in command if "=" in argument)
        seeds.append(given["seed_everything"])
        Path(given["run_dir"]).mkdir(parents=True)
        (Path(given["run_dir"]) / "config.yaml").write_text("malloc: default")
        Path(given["trainer.callbacks.path"]).write_text(json.dumps(epochs((0.9, 2, 4))))
        return 0

    monkeypatch.setattr(time_to_accuracy, "run_in_group", fake)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return seeds


def test_no_secret_is_written_down(trained: list[str], main: Callable[..., int], tmp_path: Path) -> None:
    args = ("--target=0.9", "--run_dir=tta", "--trainer.logger.api_key=sesame", "--data.root=https://bob:hunter2@host")
    assert main("benchmark", "time_to_accuracy", *args) == 0 and trained == ["0"]
    report = json.loads((tmp_path / "tta" / "time_to_accuracy.json").read_text())
    assert report["command"].endswith("'--trainer.logger.api_key=***' '--data.root=https://***@host'")


def test_ctrl_c_keeps_the_seeds_before(
    trained: list[str], main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = time_to_accuracy.run_in_group

    def stop(command: list[str]) -> int:
        if trained:
            raise KeyboardInterrupt
        return train(command)

    monkeypatch.setattr(time_to_accuracy, "run_in_group", stop)
    assert main("benchmark", "time_to_accuracy", "--target=0.9", "--seeds", "0", "1", "--run_dir=tta") == 130
    report = json.loads((tmp_path / "tta" / "time_to_accuracy.json").read_text())
    assert [run["seed"] for run in report["runs"]] == [0] and report["machine"]["lightning-mgpu"] == __version__


def test_machine_of_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "version", lambda name: {"torch": "2", "lightning": "2", "torchmetrics": "1"}[name])
    assert runner.machine("default")["lightning-mgpu"] == __version__


def test_a_run_that_leaves_nothing_behind(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`--trainer.fast_dev_run=true`: the clock's file is there, the run's directory is not."""

    def fake(command: list[str]) -> int:
        [path] = [each.partition("=")[2] for each in command if each.startswith("--trainer.callbacks.path=")]
        Path(path).write_text(json.dumps(epochs((0.9, 2, 4))))
        return 0

    monkeypatch.setattr(time_to_accuracy, "run_in_group", fake)
    assert main("benchmark", "time_to_accuracy", "--target=0.9", "--run_dir=tta") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no epoch was validated, or the run left nothing behind") and "fast_dev_run" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--target"]),
        (["--target=91"], ["--target=91", "fraction"]),
        (["--target=0.9", "--data.val_size=10"], ["--data.val_size"]),
        (["--target=0.9", "--seed_everything=1"], ["--seed_everything", "--seeds"]),
        (["--target=0.9", "--seeds", "one"], ["--seeds", "one"]),
        (["--target=0.9", "--seeds", "0", "1", "0"], ["--seeds: 0 is given twice"]),
        (["--targ=91"], ["required: --target"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str], words: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main("benchmark", "time_to_accuracy", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert list(tmp_path.iterdir()) == []
