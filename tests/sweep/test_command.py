"""`python -m lightning_mgpu sweep`: failures in the table, Ctrl-C, going on, and mistakes."""

import csv
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mgpu.sweep import cli as sweep_cli

COMMAND = ["python", "-m", "lightning_mgpu", "fit", "--data.source=synthetic", "${args}"]
SHORT = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.limit_train_batches=1")
SHORT += ("--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1", "--trainer.max_epochs=1")


def write(path: Path, **changes: Any) -> None:
    sweep = {
        "command": COMMAND,
        "method": "grid",
        "metric": {"name": "val_loss", "goal": "minimize"},
        "parameters": {"model.optimizer.lr": {"values": [0.1, 1e38, "oops"]}},
    }
    path.write_text(yaml.safe_dump({**sweep, **changes}))


@pytest.mark.slow
def test_interrupted_sweep_goes_on_and_failures_end_nothing(command: Any, tmp_path: Path) -> None:
    write(tmp_path / "rates.yaml")
    command.env["WANDB_MODE"] = "offline"
    args = ("sweep", "--config", "rates.yaml", *SHORT)
    process = command.start(*args)
    threading.Timer(150, process.kill).start()
    sweep_dir = tmp_path / "sweeps" / "rates"
    for _ in iter(process.stdout.readline, ""):
        if (sweep_dir / "sweep.png").exists():  # a line is complete: the first trial's is the second
            break
    os.kill(process.pid, signal.SIGINT)
    code, out, err = command.finish(process, timeout=60)
    assert code == 130 and "interrupted: the same command goes on with trial 1" in out and "Traceback" not in err
    assert "1 of 3 trials" in out and "best:   sweeps/rates/trial_000" in out
    first = json.loads((sweep_dir / "sweep.json").read_text())["results"]
    assert [result["trial"] for result in first] == [0]
    assert (sweep_dir / "sweep.png").exists() and not (sweep_dir / ".sweep.json").exists()

    code, out, err = command(*args, timeout=200)
    assert code == 0, err
    assert "2 of 3 trials to run, in sweeps/rates" in out
    assert "2/3  model.optimizer.lr=1e+38  failed: diverged: " in out
    assert "3/3  model.optimizer.lr=oops  failed: --model.optimizer.lr=oops: expected a number" in out
    with (sweep_dir / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    assert float(rows[0]["val_loss"]) > 0 and not rows[1]["val_loss"] and rows[1]["note"].startswith("diverged: ")
    assert (sweep_dir / "sweep.md").read_text() in out
    results = json.loads((sweep_dir / "sweep.json").read_text())["results"]
    assert results[0] == first[0] and (sweep_dir / "trial_000" / "checkpoints").exists()
    config = yaml.safe_load((sweep_dir / "trial_001" / "config.yaml").read_text())
    assert config["wandb"]["group"] == "rates" and config["wandb"]["name"] == "rates_001"
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e38

    code, out, _ = command(*args)
    assert code == 0 and "0 of 3 trials to run" in out and "| 0 | 0.1 |" in out
    code, _, err = command(*args, "--data.batch_size=3")
    assert code == 2 and err.startswith("error: sweeps/rates holds a sweep of other arguments: ")


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The learning rates of the trials run, in a moment: the loss is the rate itself, 0.2 fails."""
    run: list[str] = []

    def fake(arguments: Sequence[str], log: Path) -> str | None:
        given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
        run.append(given["model.optimizer.lr"])
        run_dir = Path(given["run_dir"])
        run_dir.mkdir()  # new, or it fails
        (run_dir / "metrics.csv").write_text(f"epoch,val_loss\n0,{run[-1]}\n")
        return "out of luck" if run[-1] == "0.2" else None

    monkeypatch.setattr("lightning_mgpu.sweep.cli.run_trial", fake)
    monkeypatch.setattr("lightning_mgpu.sweep.cli.Sweep.check_arguments", lambda self: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return run


def test_more_trials_and_failed_ones_again(
    trials: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write(tmp_path / "rates.yaml", parameters={"model.optimizer.lr": {"values": [0.1, 0.2, 0.3, 0.4]}})
    assert main("sweep", "--config=rates.yaml", "--count=2") == 0 and trials == ["0.1", "0.2"]
    assert "2/2  model.optimizer.lr=0.2  failed: out of luck" in capsys.readouterr().out
    (tmp_path / "sweeps" / "rates" / "trial_002").mkdir()  # as an interrupted trial leaves it
    assert main("sweep", "--config=rates.yaml") == 0 and trials[2:] == ["0.3", "0.4"]
    assert main("sweep", "--config=rates.yaml", "--retry") == 0 and trials[4:] == ["0.2"]
    assert "best:   sweeps/rates/trial_000" in capsys.readouterr().out
    write(
        tmp_path / "rates.yaml",
        parameters={"model.optimizer.lr": {"values": [0.1, 0.2, 0.3, 0.4]}},
        metric={"name": "val_loss", "goal": "maximize"},
    )
    assert main("sweep", "--config=rates.yaml") == 0 and len(trials) == 5  # another goal, the same trials
    assert "best:   sweeps/rates/trial_003" in capsys.readouterr().out


def test_ctrl_c_in_the_first_trial(
    trials: list[str], main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rates.yaml", parameters={"model.optimizer.lr": {"values": [0.1, 0.3]}})

    def stop(arguments: Sequence[str], log: Path) -> str | None:
        log.with_suffix("").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_mgpu.sweep.cli.run_trial", stop)
        assert main("sweep", "--config=rates.yaml") == 130
    assert main("sweep", "--config=rates.yaml") == 0 and trials == ["0.1", "0.3"]


def test_a_sweep_is_left_alone_while_it_runs(
    trials: list[str],
    main: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """The same command in a second terminal, in the middle of a trial."""
    write(tmp_path / "rates.yaml", parameters={"model.optimizer.lr": {"values": [0.1, 0.3]}})
    run_trial = sweep_cli.run_trial

    def fake(arguments: Sequence[str], log: Path) -> str | None:
        run_trial(arguments, log)
        monkeypatch.setattr(sweep_cli, "run_trial", run_trial)
        assert main("sweep", "--config=rates.yaml") == 2 and (log.with_suffix("") / "metrics.csv").exists()
        return None

    monkeypatch.setattr(sweep_cli, "run_trial", fake)
    assert main("sweep", "--config=rates.yaml") == 0 and trials == ["0.1", "0.3"]
    line = "error: sweeps/rates is still running in another process: stop that one first (--traceback shows where)"
    assert capsys.readouterr().err.splitlines() == [line]


def test_null_and_true_are_written_as_yaml_has_them(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    given: list[str] = []

    def fake(arguments: Sequence[str], log: Path) -> str | None:
        given.extend(argument for argument in arguments if argument.startswith("--trainer."))
        log.with_suffix("").mkdir()
        (log.with_suffix("") / "metrics.csv").write_text(f"epoch,val_loss\n0,{len(given)}\n")
        return None

    monkeypatch.setattr(sweep_cli, "run_trial", fake)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    clip, detect = "trainer.gradient_clip_val", "trainer.detect_anomaly"
    write(tmp_path / "clip.yaml", parameters={clip: {"values": [None, 1.0]}, detect: {"value": True}})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main("sweep", "--config=clip.yaml", "--sweep_dir=~/clip") == 0  # fit takes the arguments, too
    assert given == [f"--{detect}=true", f"--{clip}=null", f"--{detect}=true", f"--{clip}=1.0"]
    out = capsys.readouterr().out
    assert f"1/2  {clip}=null  val_loss 2.0000" in out and "| 0 | null | 2 |" in out
    assert (tmp_path / "home" / "clip" / "sweep.png").exists() and not (tmp_path / "~").exists()


def test_no_secret_is_written_down(trials: list[str], main: Callable[..., int], tmp_path: Path) -> None:
    write(tmp_path / "rates.yaml", parameters={"model.optimizer.lr": {"values": [0.1, 0.3]}})
    secrets = ("--trainer.logger.tracking_uri=https://bob:hunter2@host", "--trainer.logger.api_key=sesame")
    for total in (1, 2):  # it goes on, too
        assert main("sweep", "--config=rates.yaml", *secrets, f"--count={total}") == 0 and len(trials) == total
    written = [path.read_text() for path in (tmp_path / "sweeps" / "rates").glob("sweep.[mj]*")]
    assert len(written) == 2 and not [text for text in written if "hunter2" in text or "sesame" in text]
    assert all("https://***@host" in text for text in written)


def test_sigterm_while_the_arguments_are_checked(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rates.yaml")
    monkeypatch.setattr(sweep_cli, "CLI", lambda: sys.exit(143))
    assert main("sweep", "--config=rates.yaml") == 143 and not (tmp_path / "sweeps").exists()


def test_a_metric_nobody_logs_ends_the_sweep_with_the_first_trial(
    trials: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rates = {"model.optimizer.lr": {"values": [0.1, 0.3]}}
    write(tmp_path / "rates.yaml", metric={"name": "loss"}, parameters=rates)
    assert main("sweep", "--config=rates.yaml") == 2 and trials == ["0.1"]
    assert "metric: name: loss: no such metric is logged, but val_loss; correct it" in capsys.readouterr().err
    write(tmp_path / "rates.yaml", parameters=rates)
    assert main("sweep", "--config=rates.yaml") == 0 and trials == ["0.1", "0.3"]


def test_order_of_arguments(monkeypatch: pytest.MonkeyPatch, main: Callable[..., int], tmp_path: Path) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("lightning_mgpu.sweep.cli.Sweep.check_arguments", lambda self: None)
    monkeypatch.setattr("lightning_mgpu.sweep.cli.run_trial", lambda args, log: given.append(list(args)) or "failed")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    write(tmp_path / "rates.yaml", parameters={"seed_everything": {"value": 3}}, project="fashion")
    assert main("sweep", "--config", "rates.yaml", "--a=1", "--config", "b.yaml", "--c", "d", "--sweep_dir=my") == 0
    shared = ["--data.source=synthetic", "--wandb.project=fashion", "--config=b.yaml", "--a=1", "--c", "d"]
    wandb = ["--wandb.group=my", "--wandb.name=my_000"]  # first: one's own win
    assert given == [[*wandb, *shared, "--seed_everything=3", "--run_dir=my/trial_000"]]


@pytest.mark.parametrize(
    ("args", "changes", "words"),
    [
        ([], {}, ["required: --config"]),
        (["--config=nope.yaml"], {}, ["--config=nope.yaml: no such file", "sweep/lenet_lr.yaml"]),
        (["--config=model/lenet.yaml"], {}, ["no method; a sweep needs method"]),
        (["--config=my.yaml", "--count=0"], {}, ["--count=0: choose 1 or more"]),
        (["--config=my.yaml", "--run_dir=x"], {}, ["--run_dir: every trial has its own"]),
        (["--config=my.yaml", "--model.optimizer.lr=3"], {}, ["--model.optimizer.lr: varied by the sweep"]),
        (["--config=my.yaml", "--trainer.epochs=3"], {}, ["--trainer.epochs=3: no such option"]),
        (["--config={method: grid}"], {}, ["--config={method: grid}: a sweep is a YAML file"]),
        (["--config=my.yaml", "--trainer.fast_dev_run=true"], {}, ["--trainer.fast_dev_run: such a trial leaves no"]),
        (["--config=my.yaml", "--sweep_dir=my.yaml"], {}, ["my.yaml exists and is no sweep's"]),
        (["--config=my.yaml", "--sweep_dir=my.yaml/x"], {}, ["my.yaml/x cannot be made"]),
        (["--config=my.yaml"], {"parameters": {"model.optimizer.rl": {"value": 1}}}, ["--model.optimizer.rl=1"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str],
    changes: dict[str, Any],
    words: list[str],
    main: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    write(tmp_path / "my.yaml", **changes)
    assert main("sweep", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]
