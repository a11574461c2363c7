"""`python -m lightning_mgpu sweep`: interrupted, killed, in two terminals, failing, mistaken."""

import contextlib
import csv
import fcntl
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import wandb
import yaml
from matplotlib.figure import Figure
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from lightning_mgpu.errors import UsageError
from lightning_mgpu.models import LeNet
from lightning_mgpu.project import find_configs
from lightning_mgpu.sweep import Trial, trials
from lightning_mgpu.sweep.cli import read_sweep, sweep_parser
from lightning_mgpu.sweep.trials import TRIAL
from tests.conftest import save_figure

LR = "model.optimizer.lr"


def write(path: Path, **changes: Any) -> None:
    """A sweep that needs no `command`."""
    sweep = {
        "method": "grid",
        "metric": {"name": "val_loss"},
        "parameters": {LR: {"values": [0.1, 1e38, "oops"]}},
    }
    path.write_text(yaml.safe_dump({**sweep, **changes}))


def table(sweep_dir: Path) -> list[dict[str, str]]:
    head, _, *rows = (
        line[2:-2].split(" | ") for line in (sweep_dir / "sweep.md").read_text().splitlines()
    )
    return [dict(zip(head, row)) for row in rows]


@pytest.mark.slow
def test_a_killed_sweep_under_ddp_goes_on(
    command: Any, main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kill -9, then in this process."""
    write(tmp_path / "rates.yaml", parameters={LR: {"values": [0.1]}})
    devices = ("--trainer.accelerator=cpu", "--trainer.devices=2")
    short = ("--data.batch_size=64", "--trainer.limit_train_batches=40", "--trainer.max_epochs=3")
    data = ("--data.source=synthetic", "--trainer.limit_val_batches=1")
    args = ("sweep", "--config=rates.yaml", *devices, *short, *data)
    sweep_dir = tmp_path / "sweeps" / "rates"
    first = command.start(*args)
    while not (sweep_dir / "trial_000/checkpoints/last.ckpt").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    trial = int(os.popen(f"ps -o pid= --ppid {first.pid}").read())
    first.kill()  # with kill -9, which does not reach the trial's process
    first.wait()
    with (sweep_dir / "trial_000.log").open() as log:
        with pytest.raises(BlockingIOError):  # so that no other process takes the trial over
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.killpg(trial, signal.SIGKILL)
        fcntl.flock(log, fcntl.LOCK_EX)
    monkeypatch.setenv("PYTHONPATH", command.env["PYTHONPATH"])
    assert main(*args) == 0
    log_text = (sweep_dir / "trial_000.log").read_text()
    assert log_text.count("run:      sweeps/rates/trial_000") == 2
    assert log_text.count("epoch 1/3") == log_text.count("epoch 3/3") == 1  # resumed
    with (sweep_dir / "trial_000/metrics.csv").open() as file:
        values = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    record = json.loads((sweep_dir / "trial_000.json").read_text())
    assert len(values) == 3 and record["value"] == min(values)


def test_failures_end_nothing(
    main: Callable[..., int],
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """The trials run in this process."""

    def run(command: list[str], log: IO[str]) -> int:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            status = main(*command[3:])
        log.flush()  # it is read for an error
        return status

    monkeypatch.setattr(trials, "run_in_group", run)
    monkeypatch.setattr(Figure, "savefig", save_figure)  # the sweep's picture is drawn
    write(tmp_path / "rates.yaml")
    data = (f"--data.root={root}", "--data.val_size=101")
    one = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1")
    assert main("sweep", "--config=rates.yaml", *data, *one) == 0
    out, sweep_dir = capfd.readouterr().out, tmp_path / "sweeps" / "rates"
    assert "trial_001: failed: diverged: val_loss is nan" in out
    assert f"trial_002: failed: status 2: error: --{LR}=oops" in out
    rows = [(row["trial"], bool(row["val_loss"])) for row in table(sweep_dir)]
    assert rows == [("trial_000", True), ("trial_001", False), ("trial_002", False)]
    assert (sweep_dir / "sweep.md").read_text() in out and (sweep_dir / "sweep.png").exists()


class Fits:
    """In place of `fit`: the loss is the rate, after a worse epoch; 0.2 fails, 0.7 logs nothing.

    With rate 0.4 the first loss is NaN.
    """

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.rates: list[str] = []
        self.group = ""
        # called in every trial, before it has a result
        self.before: Callable[[], Any] = lambda: None

    def __call__(self, command: list[str], log: IO[str]) -> int:
        self.given.append(command[4:])
        options = dict(argument.removeprefix("--").split("=", 1) for argument in command[4:])
        rate = options.get(LR, "0.1")
        self.group = os.environ["WANDB_RUN_GROUP"]
        self.before()
        self.rates.append(rate)
        if rate == "0.2":
            log.write("Traceback\nRuntimeError: https://host is away\n")
            log.flush()
            return 1
        (run_dir := Path(options["run_dir"])).mkdir()
        first = "nan" if rate == "0.4" else float(rate) + 1
        losses = "" if rate == "0.7" else f"0,{first}\n1,{rate}\n2,\n"
        (run_dir / "metrics.csv").write_text(f"epoch,val_loss\n{losses}")
        return 0


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Fits:
    monkeypatch.setattr(trials, "run_in_group", fits := Fits())
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return fits


@pytest.fixture
def sweep(main: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    return lambda *args: main("sweep", "--config=rates.yaml", *args)


def test_two_terminals_share_the_trials(
    fits: Fits, sweep: Callable[..., int], tmp_path: Path
) -> None:
    drawn = {LR: {"min": 0.001, "max": 0.1, "distribution": "log_uniform_values"}}
    write(tmp_path / "rates.yaml", method="bayes", run_cap=14, parameters=drawn)

    def second() -> None:
        if len(fits.given) == 3:
            assert sweep() == 0  # all others are taken here, but for the one that runs

    fits.before = second
    assert sweep() == 0
    assert len(set(fits.rates)) == 14 == len(table(tmp_path / "sweeps/rates"))


def test_ctrl_c_more_trials_and_failures(
    fits: Fits, sweep: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    most = {"name": "val_loss", "goal": "maximize"}
    values = [0.1, 0.2, 0.3, 0.7, 0.4]
    write(tmp_path / "rates.yaml", metric=most, parameters={LR: {"values": values}})

    def interrupt() -> None:
        fits.before = lambda: None
        raise KeyboardInterrupt

    fits.before = interrupt
    assert sweep("--count=2") == 130 and fits.rates == []
    assert sweep("--count=2") == 0 and fits.rates == ["0.1", "0.2"]
    # what has failed is tried again, once per command
    assert sweep() == 0 and fits.rates == ["0.1", "0.2", "0.2", "0.3", "0.7", "0.4"]
    assert sweep() == 0 and fits.rates[6:] == ["0.2"]
    out = capsys.readouterr().out
    assert "trial_001: failed: status 1: RuntimeError: https://host is away" in out
    assert "trial_003: failed: metric: name: val_loss: no such metric is logged" in out
    rows = [(row["trial"], row["val_loss"]) for row in table(tmp_path / "sweeps/rates")]
    assert rows == [
        ("trial_002", "1.3"),
        ("trial_000", "1.1"),
        ("trial_004", "0.4"),
        ("trial_003", ""),
        ("trial_001", ""),
    ]
    assert sweep("--trainer.max_epochs=1") == 2
    assert (
        "error: sweeps/rates holds another sweep, that of its sweep.json: repeat"
        in capsys.readouterr().err
    )


def test_arguments_of_a_trial(
    fits: Fits, sweep: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    fixed = {
        "trainer.detect_anomaly": {"value": True},
        "x": {"values": [None]},
        "data.x": {"value": 8},
    }
    command = ["${env}", "python", "-m", "lightning_mgpu", "fit", "--a=1", TRIAL, "${args}"]
    early = {"type": "hyperband", "min_iter": 1}
    write(
        tmp_path / "rates.yaml",
        parameters=fixed,
        project="fashion",
        command=command,
        early_terminate=early,
    )
    assert sweep("--config", "b.yaml", "--c=d", "--sweep_dir=my") == 0
    assert "not read here, but by W&B: early_terminate, project" in capsys.readouterr().out
    assert fits.group == "my"
    [given] = fits.given
    assert given == [
        *["--curve=false", "--a=1", "--data.x=8", "--trainer.detect_anomaly=true"],
        *["--config=b.yaml", "--c=d", "--x=null", "--run_dir=my/trial_000", TRIAL],
    ]


@pytest.mark.parametrize(
    ("args", "changes", "words"),
    [
        (["--config=model/resnet18.yaml"], {}, "it has no method and no metric and no parameters"),
        (
            ["--config=my.yaml"],
            {"method": "bayes"},
            "needs a number of trials: --count=20 here, or run_cap",
        ),
        (["--config=my.yaml", f"--{LR}=3"], {}, f"--{LR}: the sweep sets it"),
        (
            ["--config=my.yaml", "--sweep_dir=my.yaml"],
            {},
            "--sweep_dir=my.yaml cannot be made: File exists",
        ),
        (["--config=my.yaml"], {"method": "gird"}, "method: gird, goal: minimize: choose grid"),
        (
            ["--config=my.yaml"],
            {"parameters": {"x": {"min": 0.1, "max": 1.0}}},
            "a grid needs values",
        ),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str],
    changes: dict[str, Any],
    words: str,
    main: Callable[..., int],
    tmp_path: Path,
    capsys: Any,
) -> None:
    write(tmp_path / "my.yaml", **changes)
    assert main("sweep", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_a_launchers_processes_run_no_sweep(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write(tmp_path / "my.yaml")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert main("sweep", "--config=my.yaml") == 2
    assert capsys.readouterr().err.startswith("error: sweep runs alone: of the processes")
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_without_optuna(
    main: Callable[..., int], without_package: Callable, monkeypatch: Any, capsys: Any
) -> None:
    without_package("optuna")
    for name in ("cli", "trials"):
        monkeypatch.delitem(sys.modules, f"lightning_mgpu.sweep.{name}")
    assert main("sweep", "--config=my.yaml") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: No module named 'optuna'")
    assert 'pip install optuna, or pip install -e ".[sweep]"' in err


def test_a_trial_does_not_tune_on_the_test_set(make_data: Callable, make_trainer: Callable) -> None:
    with pytest.raises(UsageError, match=r"would tune on it: give --data\.val_size=5000"):
        make_trainer(callbacks=[Trial()]).fit(LeNet(), make_data(val_size=0))


@pytest.mark.slow
def test_commands_of_the_pages_are_taken(main: Callable[..., int]) -> None:
    root = Path(__file__).parents[2]
    text = "\n".join(
        path.read_text() for path in (root / "README.md", *(root / "docs").glob("*.md"))
    )
    for line in dict.fromkeys(
        re.findall("^python -m lightning_mgpu sweep (.*)$", text, flags=re.MULTILINE)
    ):
        assert read_sweep(shlex.split(line)), line
        args, fit = sweep_parser().parse_known_args(shlex.split(line))
        assert (
            main(
                "fit", *fit, *(f"--config={config}" for config in args.config[1:]), "--print_config"
            )
            == 0
        ), line


SHORT = {
    "data.source": "synthetic",
    "trainer.max_epochs": 1,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
}
SHORT |= {f"trainer.limit_{part}_batches": 1 for part in ("train", "val", "test")}
ARGS = {"model.optimizer.lr": 0.0625, "run_dir": "run", "wandb.mode": "offline", **SHORT}


@pytest.mark.filterwarnings("ignore:data.source=synthetic")
def test_what_wandbs_agent_starts(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shipped sweep trains by the command line that the agent's own functions make."""
    given = {name: {"value": value} for name, value in ARGS.items()}
    save_config_file_from_dict("wandb/given.yaml", given)
    agents = {
        "SWEEP_ID": "abcd1234",
        "RUN_ID": "run45678",
        "SWEEP_PARAM_PATH": "wandb/given.yaml",
        "API_KEY": "0" * 40,
    }
    monkeypatch.delenv("WANDB_MODE")
    for name, value in agents.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it reads the environment again
    sweep = yaml.safe_load((find_configs("lightning_mgpu") / "sweep" / "lenet_lr.yaml").read_text())
    *start, args = create_sweep_command(sweep["command"])
    assert start[:3] == ["python", "-m", "lightning_mgpu"] and args == "${args}"
    assert main(*start[3:], *create_sweep_command_args({"args": given})["args"]) == 0
    wandb.teardown()  # all is written
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (
        config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == ARGS["model.optimizer.lr"]
    )
    logged = (tmp_path / "run" / "metrics.csv").read_text()
    assert (
        "val_acc" in logged
        and "test_acc" not in logged
        and not list((tmp_path / "run").glob("*.png"))
    )  # a trial
    # the run is the one the agent named, and knows its sweep
    [recorded] = (tmp_path / "run" / "wandb").glob("offline-run-*-run45678/*.wandb")
    assert b"abcd1234" in recorded.read_bytes()
