"""`python -m lightning_mgpu benchmark`: its measurements, its files and its errors."""

import csv
import json
import os
import re
import runpy
import shlex
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.benchmark import cli, cost, exchange, processes, steps, time_to_accuracy
from lightning_mgpu.benchmark.parts import PARTS, Parts
from lightning_mgpu.benchmark.plan import Configuration
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.errors import UsageError
from lightning_mgpu.strategies.hooks import overridden
from lightning_mgpu.strategies.updates import Updates
from tests.conftest import REPOSITORY, run_devices

BY_PATH = "lightning_mgpu.strategies.ManualAllreduceStrategy"
SMALL = ("--models=LeNet", "--devices=2", "--batch_size=16", "--num_steps=2")


@pytest.mark.parametrize(
    ("engine", "devices", "replicas"),
    [
        ("loop", 1, None),
        ("auto", 1, None),
        ("book", 1, 2),
        ("manual_allreduce", 1, 2),
        (BY_PATH, 2, None),
    ],
)
def test_a_measurement(engine: str, devices: int, replicas: int | None) -> None:
    options: Any = {"devices": devices, "batch_size": 8, "replicas": replicas, "num_steps": 2}
    configuration = Configuration(engine, **options)
    data = FashionMNIST(batch_size=8, source="synthetic")
    measure = steps.measure_loop if engine in ("loop", "book") else steps.measure_strategy
    found: Any = measure(configuration, data)
    assert list(found["parts"]) == list(PARTS) and found["step"] > 0
    assert all(found["parts"][part] > 0 for part in ("data", "forward", "backward", "update"))
    assert (found["parts"]["strategy"] > 0) == (engine not in ("loop", "auto", "book"))
    if engine != "loop":  # whose exchange of one device does nothing, in no time
        assert (found["parts"]["allreduce"] > 0) == (engine != "auto")


@pytest.mark.parametrize("engine", ["book", "manual_allreduce"])
def test_the_clock_waits_for_the_devices_in_use(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for another process's GPU would open a context on it."""
    asked: list[torch.device] = []

    def clock(devices: Any) -> Callable[[], float]:
        asked.extend(devices)
        return time.perf_counter

    monkeypatch.setattr(steps, "finished_clock", clock)
    configuration = Configuration(engine, devices=2, batch_size=8, num_steps=1)
    data = FashionMNIST(batch_size=8, source="synthetic")
    (steps.measure_loop if engine == "book" else steps.measure_strategy)(configuration, data)
    assert asked == run_devices(2)


def test_its_callback_is_not_taken_for_a_users() -> None:
    """The file runs as `__main__`, like a user's, whose hooks stop replicas' own updates."""
    timer = runpy.run_module("lightning_mgpu.benchmark.steps", run_name="run")["StepTimer"]
    assert not overridden(timer)


def test_two_timer_after_the_warm_up() -> None:
    now = 0.0
    parts = Parts(lambda: now)
    timer, is_last, watched = steps.StepTimer(parts, 5), False, []
    while not is_last:
        now += 7.0 if len(watched) < 3 else 0.1  # compiles
        watched.append(parts.is_on)
        is_last = timer.count_step()
    assert timer.seconds == pytest.approx([0.5, 0.5]) and watched == [False] * (3 + 5) + [True] * 5


def test_the_cost_is_of_replicas_that_update_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a callback that might edit weights, they would get copies of the first one's."""
    update, have_updated = Updates.repeat, list[bool]()

    def repeat(*args: Any) -> bool:
        have_updated.append(update(*args))
        return have_updated[-1]

    monkeypatch.setattr(Updates, "repeat", repeat)
    assert cost.trainer_step(cost.Layers(2, logs=True), "manual_allreduce", 2, num_steps=3) > 0
    assert have_updated == [True] * (cost.WARM_UP + 3)


@pytest.mark.parametrize("only", ["steps", "exchange", "cost"])
def test_only_that_is_measured(
    only: str, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(cli, "measure", lambda worker, *_: measured.append(worker))
    assert main("benchmark", "--only", only, *SMALL, "--run_dir=bench") == 0 and measured == [only]


@pytest.mark.slow
def test_report(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Of the steps, the allreduce alone, and the engine; an algorithm of one's own works, too.

    Every worker is started once. Its other measurements are made in this process, which is faster.
    """
    is_simulated = run_devices(1)[0].type == "sim"
    strategy = "dp" if is_simulated else "ddp"  # whose processes need devices that gloo knows
    run_worker, worker_functions = processes.run_worker, dict[str, Callable[..., Any]]()
    worker_functions["steps"] = steps.measure_steps
    worker_functions["exchange"] = exchange.measure_exchange

    def run(worker: str, arguments: dict[str, Any]) -> Any:
        if worker == "cost" or {strategy, "mine.ring"}.intersection(map(str, arguments.values())):
            return run_worker(worker, arguments)
        return json.loads(json.dumps(worker_functions[worker](**arguments))), None

    monkeypatch.setattr(processes, "run_worker", run)
    monkeypatch.setattr(steps, "num_cores", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # `measure_steps` takes it away
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    code = "from lightning_mgpu.allreduce import ring_allreduce as ring\n"
    (tmp_path / "mine.py").write_text(code)
    sizes = ("--quick", "--sizes", "4096", "1048576", "--seconds=0.01", "--algorithms", "mine.ring")
    options = ("--repeats=1", "--run_dir=bench", "--strategies", strategy)
    assert main("benchmark", *SMALL, *sizes, *options) == 0
    out = capfd.readouterr().out
    assert ("simulated device" in out) == is_simulated
    report = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert [result["error"] for result in report["results"]] == [None] * 4
    assert all(result["repeats"][0]["step"] > 0 for result in report["results"])
    algorithms = [result["configuration"]["algorithm"] for result in report["exchange"]]
    assert algorithms == ["mine.ring", exchange.LIMIT]
    for result in report["exchange"]:
        [found] = result["repeats"]
        assert list(found) == ["4 kB", "1 MB", "LeNet", "LeNet, flat"]
        assert all(0 < case["2"] < 10 for case in found.values())
    lines = [line for line in cost.cost_table(report["cost"]) if " layers" in line]
    rows = [line[2:-2].split(" | ") for line in lines]
    # not the last one, a difference, which other programs can make negative
    assert len(rows) == 2 * 2 * 2 and all(float(cell) > 0 for row in rows for cell in row[1:-1])
    assert f"| {' | '.join(rows[-1])} |" in out
    assert (tmp_path / "bench" / "benchmark.md").read_text() in out
    assert "**The allreduce alone: LeNet, flat**" in out
    pictures = {path.name for path in (tmp_path / "bench").glob("*.png")}
    assert pictures == {"parts_LeNet.png", "exchange.png"}


def test_ctrl_c_keeps_what_is_done(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(worker: str, plan: Any, repeats: int, results: list[Any]) -> None:
        [configuration, *_] = plan.values()
        results.append({"configuration": configuration, "repeats": [None], "error": "not yet"})
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "measure", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main("benchmark", *SMALL, "--run_dir=bench") == 130
    assert len(json.loads(Path("bench/benchmark.json").read_text())["results"]) == 1


def test_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "gpus", lambda: [torch.device("cuda", 0)])
    message = "--devices 2: GPUs here: 1; CUDA_VISIBLE_DEVICES= hides them"
    with pytest.raises(UsageError, match=message):
        cli.benchmark_command(["--quick"])


@pytest.mark.slow
def test_commands_of_the_pages_are_taken(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "benchmark", wraps(cli.benchmark)(lambda **options: None))
    root = Path(__file__).parents[2]
    pages = (root / "README.md", *(root / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall("^python -m lightning_mgpu benchmark (.*)$", text, flags=re.MULTILINE)
    assert len(lines) > 5
    for line in dict.fromkeys(lines):
        if line.startswith("time_to_accuracy "):
            _, fit_args = time_to_accuracy.parse(shlex.split(line)[1:])
            assert main("fit", *fit_args, "--print_config") == 0, line
        else:
            cli.benchmark_command(shlex.split(line))  # raises a UsageError


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategies", "dpp"], ["strategy dpp: no such strategy", "manual_allreduce"]),
        (["--models", "LeNett"], ["model LeNett: ", "Take LeNet, ResNet18, or a path"]),
        (["--algorithms", "rng"], ["--algorithms rng: ", "choose from textbook, "]),
        (
            ["--algorithms", "my_exchange.forgetful"],
            ["my_exchange.forgetful", "instead of the sum"],
        ),
        (["--only=cost", "--num_steps=0"], ["--num_steps: ", "0 does not conform"]),
        (["--only=cost", "--repeats=0"], ["--repeats: ", "0 does not conform"]),
        (["--run_dir=my_exchange.py"], ["--run_dir=my_exchange.py cannot be made: File exists"]),
        (["time_to_accuracy", "--target=91"], ["--target=91.0: choose a fraction"]),
        (
            ["time_to_accuracy", "--target=0.9", "--data.val_size=10"],
            ["--data.val_size: time_to_accuracy sets it"],
        ),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str],
    words: list[str],
    main: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "my_exchange.py").write_text("def forgetful(data):\n    data[0].add_(data[1])\n")
    assert main("benchmark", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert {path.name for path in tmp_path.iterdir()} <= {"my_exchange.py", "__pycache__"}


def test_summary_over_seeds() -> None:
    runs = [
        {"epochs": [{"accuracy": 0.8, "seconds": t}, {"accuracy": last, "seconds": 2 * t}]}
        for t, last in ((1.0, 0.9), (2.0, 0.94))
    ]
    end = "accuracy at the end 0.9200 +- 0.0283"
    both, one = (time_to_accuracy.summary(runs, target) for target in (0.9, 0.92))
    assert both == f"test accuracy 0.9: 3.0 +- 1.4 s of training over 2 seeds; {end}"
    assert one == f"test accuracy 0.92: reached by 1 of 2 seeds; {end}"


def test_a_run_for_every_seed_until_a_fit_fails(
    main: Callable[..., int], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    given: list[dict[str, str]] = []

    def run(command: list[str]) -> int:
        options = [argument.removeprefix("--") for argument in command if "=" in argument]
        given.append(dict(option.split("=", 1) for option in options))
        return 3 if len(given) == 3 else main(*command[3:])

    monkeypatch.setattr(time_to_accuracy, "run_in_group", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    args = ("--target=0.01", "--seeds", "5", "6", "7", "--run_dir=tta", f"--data.root={root}")
    short = "--trainer.accelerator=cpu --trainer.max_epochs=3 --trainer.check_val_every_n_epoch=2"
    fit_args = (*short.split(), "--trainer.devices=1")
    assert main("benchmark", "time_to_accuracy", *args, *fit_args) == 3
    seeds = [(options["seed_everything"], options["data.val_size"]) for options in given]
    assert seeds == [("5", "0"), ("6", "0"), ("7", "0")]
    assert re.search(r"test accuracy 0\.01: .* s of training over 2 seeds", capsys.readouterr().out)
    report = json.loads(Path("tta/time_to_accuracy.json").read_text())
    assert "--trainer.max_epochs=3" in report["command"]
    assert [run["seed"] for run in report["runs"]] == [5, 6]
    [tested] = report["runs"][0]["epochs"]  # of three
    with open("tta/seed_5/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    seconds = [float(row["epoch_seconds"]) for row in rows if row["epoch_seconds"]]
    assert len(seconds) == 3 and tested["epoch"] == 2
    assert tested["seconds"] == pytest.approx(sum(seconds[:2]))
