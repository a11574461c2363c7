"""`python -m lightning_mgpu sweep`: interrupted, killed, in two terminals, failing, mistaken."""

import fcntl
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from lightning_mgpu.cli.yaml_files import config_dirs
from lightning_mgpu.runs.metrics import read_rows
from lightning_mgpu.sweep import cli
from tests.conftest import REPOSITORY

LR = "model.lr"
CPU = ("--data.source=synthetic", "--trainer.accelerator=cpu")


def write(values: list[Any], path: str = "rates.yaml", **changes: Any) -> None:
    sweep = {
        "method": "grid",
        "metric": {"name": "val_loss", "goal": "minimize"},
        "parameters": {LR: {"values": values}},
    }
    Path(path).write_text(yaml.safe_dump({**sweep, **changes}))


def table(sweep_dir: Path) -> list[tuple[str, str]]:
    """The trials and their results, the best one first."""
    _, _, *rows = (sweep_dir / "sweep.md").read_text().splitlines()
    return [(cells[1].strip(), cells[-2].strip()) for cells in (row.split("|") for row in rows)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.weekly)])
def test_a_killed_sweep_goes_on(
    devices: int, command: Any, main: Callable[..., int], tmp_path: Path, monkeypatch: Any
) -> None:
    """With kill -9, then in this process. Under `ddp` too, whose resumed runs tests/runs has."""
    write([0.1])
    short = ("--data.batch_size=64", "--trainer.limit_train_batches=40", "--trainer.max_epochs=3")
    few = (f"--trainer.devices={devices}", "--trainer.limit_val_batches=1")
    args = ("sweep", "--config=rates.yaml", *CPU, *few, *short)
    sweep_dir = tmp_path / "sweeps" / "rates"
    first = command.start(*args)
    while not (sweep_dir / "trial_000/checkpoints/last.ckpt").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    trial = int(os.popen(f"ps -o pid= --ppid {first.pid}").read())
    first.kill()  # which does not reach the trial's process
    first.wait()
    os.killpg(trial, signal.SIGKILL)
    with (sweep_dir / "trial_000.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # it has gone
    monkeypatch.setenv("PYTHONPATH", command.env["PYTHONPATH"])
    assert main(*args) == 0
    log = (sweep_dir / "trial_000.log").read_text()
    assert log.count("epoch 1/3") == log.count("epoch 3/3") == 1  # resumed
    rows = read_rows(sweep_dir / "trial_000")
    best = min(float(row["val_loss"]) for row in rows if row["val_loss"])
    assert table(sweep_dir) == [("trial_000", f"{best:.4g}")]
    assert (sweep_dir / "sweep.png").exists()


class Fits:
    """In place of `fit`: the loss is the rate, after a worse epoch; 0.2 fails, 0.7 logs nothing."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.rates: list[str] = []
        self.before: Callable[[], Any] = lambda: None  # called before a trial has a result

    def __call__(self, command: list[str], log: IO[str]) -> int:
        self.given.append(command[4:])
        options = dict(argument.removeprefix("--").split("=", 1) for argument in command[4:])
        self.before()
        self.rates.append(rate := options[LR])
        (run_dir := Path(options["run_dir"])).mkdir()
        losses = "" if rate == "0.7" else f"0,{float(rate) + 1}\n1,{rate}\n2,\n"
        (run_dir / "metrics.csv").write_text(f"epoch,val_loss\n{losses}")
        return int(rate == "0.2")


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    monkeypatch.setattr(cli, "run_in_group", fits := Fits())
    return fits


@pytest.fixture
def sweep(main: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: main("sweep", "--config=rates.yaml", *args)


def test_two_terminals_share_the_trials(fits: Fits, sweep: Callable[..., int]) -> None:
    drawn = {LR: {"min": 0.001, "max": 0.1, "distribution": "log_uniform_values"}}
    write([], method="bayes", run_cap=12, parameters=drawn)
    # in the third trial: all others are taken there, but for the one that runs
    fits.before = lambda: len(fits.given) != 3 or sweep()
    assert sweep() == 0
    assert len(set(fits.rates)) == 12 == len(table(Path("sweeps/rates")))


def test_ctrl_c_more_trials_and_failures(
    fits: Fits, sweep: Callable, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write([0.1, 0.2, 0.3, 0.7], metric={"name": "val_loss", "goal": "maximize"})
    stars: list[float] = []  # where the picture marks the best trial
    note = lambda: stars.append(cli.plt.gcf().axes[0].lines[-1].get_ydata()[0])  # noqa: E731
    monkeypatch.setattr(cli.plt, "close", note)

    def interrupt() -> None:
        fits.before = lambda: None
        raise KeyboardInterrupt

    fits.before = interrupt
    assert sweep("--count=2") == 130 and fits.rates == []
    assert sweep("--count=2") == sweep("--count=1") == 0 and fits.rates == ["0.1", "0.2"]
    assert sweep() == 0 and fits.rates == ["0.1", "0.2", "0.3", "0.7"]
    assert stars[-1] == 1.3
    best = [("trial_002", "1.3"), ("trial_000", "1.1")]
    assert table(Path("sweeps/rates")) == [*best, ("trial_001", "None"), ("trial_003", "None")]
    out = capsys.readouterr().out
    for told in ("trial_001: failed, status 1: see ", "trial_003: failed, val_loss was not logged"):
        assert told in out
    assert sweep("--trainer.max_epochs=1") == 2
    assert "sweeps/rates holds another sweep" in capsys.readouterr().err


def test_arguments_of_a_trial(fits: Fits, sweep: Callable[..., int]) -> None:
    """Lists and mappings are values, too."""
    sizes = [[3, 4], None, {"a": 1}]
    values = {"data.augment": {"value": True}, LR: {"values": [0.1]}, "x": {"values": sizes}}
    line = ["${env}", "python", "-m", "lightning_mgpu", "fit", "--a=1", "${args}"]
    write([], parameters=values, project="fashion", command=line)
    Path("b.yaml").write_text("trainer: {max_epochs: 1}")
    for _ in range(2):  # again when all have ended
        assert sweep("--config", "b.yaml", "--c=d", "--sweep_dir=my") == 0
    first = ["--output.test=false", "--output.curve=false", "--a=1", "--data.augment=true"]
    given = ["--config=b.yaml", "--c=d", f"--{LR}=0.1"]
    for i, (text, found) in enumerate(zip(("[3, 4]", "null", '{"a": 1}'), fits.given, strict=True)):
        assert found == [*first, *given, f"--x={text}", f"--run_dir=my/trial_00{i}"]
    assert Path("my/sweep.png").exists()


def test_no_trial_has_a_value(fits: Fits, sweep: Callable, capsys: Any) -> None:
    write([0.2, 0.7])
    assert sweep() == 2
    assert "no trial in sweeps/rates has a value of val_loss: mend" in capsys.readouterr().err


def test_mistakes_end_in_one_line(fits: Fits, sweep: Callable, main: Callable, capsys: Any) -> None:
    """Before a trial begins. One is a validation on the test set."""
    write([0.1])
    write([0.1], "random.yaml", method="random")
    Path("data.yaml").write_text("data: {init_args: {val_size: 0}}")
    assert main("sweep", "--config=random.yaml") == sweep(f"--{LR}=3") == 2
    assert main("sweep", "--config=model/resnet18.yaml") == 2
    assert sweep("--data.val_size=0") == sweep("--config=data.yaml") == 2
    write([0.1], parameters={"data.val_size": {"values": [0, 5]}, LR: {"values": [0.1]}})
    assert sweep() == 2
    write([0.1], parameters={LR: {"min": 0.1, "max": float("nan")}}, method="random", run_cap=1)
    assert sweep() == sweep("--count=0") == sweep("--sweep_dir=") == 2
    for more in (
        {"parameters": {"model": {"parameters": {"lr": {"values": [0.1]}}}}},
        {"metric": {"name": "val_loss"}},
        {"metric": {"name": "val_loss", "goal": "max"}},
        {"early_terminate": {"type": "hyperband"}},
        {"parameters": {LR: {"values": [0.1], "probabilities": [1]}}},
    ):
        write([0.1], **more)
        assert sweep() == 2
    first, second, third, *others = capsys.readouterr().err.splitlines()
    assert "with --count=20" in first and f"--{LR}: the sweep sets it" in second
    assert "is not a sweep" in third and not fits.given
    assert ["error: --data.val_size=0: " in line for line in others[:3]] == [True] * 3
    assert f"--{LR}: {{'max': nan, 'min': 0.1}}: min is below max" in others[3]
    assert "--count=0: a number from 1" in others[4] and "--sweep_dir= has no" in others[5]
    assert "--model: {'parameters': " in others[6] and "but dotted names" in others[6]
    words = ("goal: None:", "goal: max:", "early_terminate:", "probabilities:")
    for line, told in zip(others[7:], words):
        assert told in line
    assert len(others) == 11


def test_a_full_disk(sweep: Callable[..., int], capsys: Any, full_disk: Any) -> None:
    write([0.1])
    assert sweep() == 2
    err = capsys.readouterr().err
    assert "sweep.db: disk I/O error; once that is mended" in err and err.count("\n") == 1, err


def test_commands_of_the_pages_are_taken() -> None:
    text = "".join(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))
    text += (REPOSITORY / "README.md").read_text()
    for line in re.findall("^python -m lightning_mgpu sweep (.*)$", text, flags=re.MULTILINE):
        assert cli.Sweep(shlex.split(line)).space, line


def test_what_wandbs_agent_starts(main: Callable[..., int], capsys: Any) -> None:
    """The agent's own functions make a command line that `fit` takes."""
    sweep = yaml.safe_load((config_dirs()[-1] / "sweep" / "lenet_lr.yaml").read_text())
    *start, args = create_sweep_command(sweep["command"])
    assert start[:3] == ["python", "-m", "lightning_mgpu"] and args == "${args}"
    given = create_sweep_command_args({"args": {LR: {"value": 0.0625}}})["args"]
    assert main(*start[3:], *given, "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["init_args"]["lr"] == 0.0625 and not config["output"]["test"]
