"""`python -m lightning_mgpu sweep`: killed, in two terminals, interrupted, failing, mistaken."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from lightning_mgpu.cli.yaml_files import config_dirs
from lightning_mgpu.runs.metrics import read_rows
from tests.conftest import REPOSITORY

LR = "model.lr"
LOG = {"min": 0.001, "max": 0.1, "distribution": "log_uniform_values"}
# a package whose `fit` notes that it was started, and ends when there is a file `go`
PACKAGE = """
import sys, time, json
from pathlib import Path

if sys.argv[1] == "sweep":
    from lightning_mgpu.cli.main import main
    main()
else:
    options = dict(arg[2:].split("=") for arg in sys.argv[2:])
    with open("started", "a") as file:
        file.write(options["model.lr"] + "\\n")
    (run_dir := Path(options["run_dir"])).mkdir()
    while not Path("go").exists():
        time.sleep(0.01)
    end = {"state": "finished", "metrics": {"val_loss": float(options["model.lr"])}}
    (run_dir / "run.json").write_text(json.dumps({"end": end}))
"""


def write(values, **changes):
    metric = {"name": "val_loss", "goal": "minimize"}
    sweep = {"method": "grid", "metric": metric, "parameters": {LR: {"values": values}}}
    Path("rates.yaml").write_text(yaml.safe_dump({**sweep, **changes}))


def results(directory="sweeps/rates"):
    trials = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))]
    return {str(trial["params"][LR]): trial["value"] for trial in trials}


def wait_for(process, is_true):
    while not is_true():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.weekly)])
def test_a_killed_sweep_continues(devices, command, tmp_path, monkeypatch):
    """After `kill -9` of the sweep and of its `fit`, by the same command."""
    monkeypatch.chdir(tmp_path)
    write([0.1])
    args = ["sweep", "--config=rates.yaml", "--data.source=synthetic", "--trainer.accelerator=cpu"]
    args += ["--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1"]
    args += ["--trainer.max_epochs=3", f"--trainer.devices={devices}"]
    run_dir = Path("sweeps/rates/trial_000")
    first = command.start(*args)
    wait_for(first, (run_dir / "checkpoints/last.ckpt").exists)
    fit = int(os.popen(f"ps -o pid= --ppid {first.pid}").read())
    first.kill()  # which does not reach its `fit`
    first.wait()
    os.killpg(fit, signal.SIGKILL)
    status, out, err = command(*args)
    assert status == 0, out + err
    log = run_dir.with_suffix(".log").read_text()
    assert log.count("epoch 1/3") == log.count("epoch 3/3") == 1 and "testing" not in log
    best = min(float(row["val_loss"] or "inf") for row in read_rows(run_dir))
    header, row = (line.split() for line in out.splitlines()[-2:])
    assert dict(zip(header, row))["val_loss"] == f"{best:.5g}" == f"{results()['0.1']:.5g}"


@pytest.mark.slow
def test_two_terminals_share_the_trials(command, tmp_path, monkeypatch):
    """A third was killed, but not its `fit`. Both wait for this, and no trial runs twice."""
    monkeypatch.chdir(tmp_path)
    Path("stub").mkdir()
    Path("stub/__main__.py").write_text(PACKAGE)
    write([], method="bayes", run_cap=12, parameters={LR: LOG})
    args, package = ("sweep", "--config=rates.yaml"), ("-m", "stub")
    killed = command.start(*args, launcher=package)
    wait_for(killed, Path("started").exists)
    killed.kill()
    killed.wait()
    terminals = [command.start(*args, launcher=package) for _ in range(2)]
    wait_for(terminals[0], lambda: len(Path("started").read_text().split()) == 3)
    Path("go").touch()
    for process in terminals:
        status, out, err = command.finish(process, 120)
        assert status == 0 and out.count("finished") == 12, out + err
    started = Path("started").read_text().split()
    assert len({*started}) == len(started) == 12
    assert results() == {rate: float(rate) for rate in started}


@pytest.fixture
def fits(monkeypatch):
    """Arguments of `fit`, whose loss is the learning rate; 0.2 fails, 0.5 is Ctrl-C once."""
    given = []

    def fit(command, log):
        given.append(command[4:])
        options = dict(argument[2:].split("=", 1) for argument in command[4:])
        rate = options.get(LR, "0.1")
        if rate == "0.5" and given.count(command[4:]) == 1:
            raise KeyboardInterrupt
        (run_dir := Path(options["run_dir"])).mkdir()
        state = "failed" if rate == "0.2" else "finished"
        metrics = {"val_loss": float(rate), "val_acc": 0.1}
        (run_dir / "run.json").write_text(json.dumps({"end": {"state": state, "metrics": metrics}}))

    monkeypatch.setattr("lightning_mgpu.sweep.run_in_group", fit)
    return given


@pytest.fixture
def sweep(main):
    return lambda *args: main("sweep", "--config=rates.yaml", *args)


def test_ctrl_c_more_trials_and_failures(fits, sweep, capsys):
    """A trial that failed, or has no finite value, is not tried again."""
    write([0.5, 0.2, 0.3, "nan"])
    assert [sweep("--count=2") for _ in range(3)] == [130, 0, 0] and len(fits) == 3
    assert sweep() == 0 and results() == {"0.5": 0.5, "0.2": None, "0.3": 0.3, "nan": None}
    assert sweep("--trainer.max_epochs=1") == 2 and len(fits) == 5
    assert "sweeps/rates contains another sweep" in capsys.readouterr().err
    write([0.2, "nan"])
    assert sweep("--sweep_dir=b") == sweep("--sweep_dir=b") == 2 and len(fits) == 7
    assert "no trial logged val_loss: see the logs, then delete b" in capsys.readouterr().err


def test_bayes_draws_by_the_values(fits, sweep):
    for method in ("random", "bayes"):  # the first ten trials of both are random
        write([], method=method, run_cap=14, parameters={LR: LOG})
        assert sweep(f"--sweep_dir={method}") == 0
    first, second = ([*map(float, results(method))] for method in ("random", "bayes"))
    assert first[:10] == second[:10] and sum(second[10:]) < sum(first[10:])


def test_arguments_of_a_trial(fits, sweep):
    """Lists and mappings are values, too. Nothing turns on the test."""
    sizes = {"values": [[3, 4], None, {"a": 1}]}
    values = {"data.augment": {"value": True}, "output.test": {"value": True}, "x": sizes}
    values["y"] = {"values": ["z"]}
    line = ["python", "-m", "lightning_mgpu", "fit", "--a=1", "${args}"]
    write([], parameters=values, command=line, metric={"name": "val_acc", "goal": "maximize"})
    Path("b.yaml").write_text("output: {test: true}")
    for _ in range(2):  # again when all have ended
        assert sweep("--config", "b.yaml", "--output.test=true", "--sweep_dir=my") == 0
    first = ["--output.curve=false", "--checkpoint.monitor=val_acc", "--checkpoint.mode=max"]
    first += ["--a=1", "--data.augment=true", "--output.test=true"]
    first.append("--config={output: {test: true}}\n")  # read when the sweep begins
    for i, (text, found) in enumerate(zip(("[3, 4]", "null", '{"a": 1}'), fits, strict=True)):
        trial = [f"--x={text}", "--y=z", f"--run_dir=my/trial_00{i}", "--output.test=false"]
        assert found == [*first, "--output.test=true", *trial]


def test_mistakes_end_in_one_line(fits, sweep, capsys):
    Path("data.yaml").write_text("data: {init_args: {val_size: 0}}")
    for reason, changes, *args in (
        ("method: must be grid, or random or bayes with --count", {"method": "random"}),
        ("2 trials: the grid has 1 points", {}, "--count=2"),
        ("KeyError('goal')", {"metric": {"name": "val_loss"}}),
        ("goal: max: must be minimize or maximize", {"metric": {"name": "a", "goal": "max"}}),
        ("early_terminate: ", {"early_terminate": {"type": "hyperband"}}),
        ("parameters: at least one must have values", {"parameters": {}}),
        ("--model: use value", {"parameters": {"model": {"parameters": {}}}}),
        ("not {'probabilities'", {"parameters": {LR: {"values": [0.1], "probabilities": [1]}}}),
        (f"{LR}: use value", {"parameters": {LR: {"min": 1, "max": 10**400}}}),
        (f"--{LR}: the sweep sets this option", {}, f"--{LR}", "3"),
        ("--run_dir: the sweep sets this option", {}, "--run_dir=a"),
        ("--data.val_size=0: trials would be tuned", {}, "--data.val_size=0"),
        ("--data.val_size=0: trials would be tuned", {}, "--config=data.yaml"),
    ):
        write([0.1], **changes)
        assert sweep(*args) == 2 and not fits
        err = capsys.readouterr().err
        assert reason in err and err.count("\n") == 1, err


def test_commands_of_the_pages_are_taken(fits, main):
    text = "".join(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))
    for line in re.findall("^python -m lightning_mgpu sweep (.*)$", text, flags=re.MULTILINE):
        assert main("sweep", *shlex.split(line), f"--sweep_dir={len(fits)}") == 0, line


def test_what_wandbs_agent_starts(main, capsys):
    sweep = yaml.safe_load((config_dirs()[-1] / "sweep" / "lenet_lr.yaml").read_text())
    *start, args = create_sweep_command(sweep["command"])
    assert start[:3] == ["python", "-m", "lightning_mgpu"] and args == "${args}"
    given = create_sweep_command_args({"args": {LR: {"value": 0.0625}}})["args"]
    assert main(*start[3:], *given, "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["init_args"]["lr"] == 0.0625 and not config["output"]["test"]
