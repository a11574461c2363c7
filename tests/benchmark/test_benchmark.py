"""`python -m lightning_mgpu benchmark`: its plan, its rounds, its tables, and its mistakes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.benchmark import cli, exchange, rounds, worker
from lightning_mgpu.benchmark.report import exchange_tables, headline, step_tables
from lightning_mgpu.tools import UsageError

OTHERS = """
def forgetful(tensors):
    tensors[0].add_(tensors[1])
"""


@pytest.fixture(autouse=True)
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty directory with a function of one's own, on a machine without GPUs."""
    for module in (exchange, rounds, worker):
        monkeypatch.setattr(module, "gpus", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that are started
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others.py").write_text(OTHERS)
    yield
    sys.modules.pop("others", None)


def step(engine: str, seconds: list[float], devices: int = 2, **more: Any) -> dict[str, Any]:
    configuration = worker.Configuration("LeNet", engine, devices, None, 8, 3)
    return {**rounds.plan_steps(configuration), "seconds": seconds, **more}


@pytest.mark.slow
def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of the plan's four configurations: processes take seconds to start."""
    plan, kept = cli.configurations, ("loop", "ddp")
    monkeypatch.setattr(
        cli, "configurations", lambda args: [each for each in plan(args) if each.engine in kept]
    )
    steps = "--models LeNet --strategies ddp --num_steps 2 --batch_size 16"
    alone = "--algorithms lightning_mgpu.allreduce.ring_allreduce --sizes 0.001 1"
    cli.benchmark_command(f"{steps} {alone} --repeats 1 --run_dir bench".split())
    report = json.loads(Path("bench/benchmark.json").read_text())
    assert [result["engine"] for result in report["steps"]] == [*kept]
    for each in (*report["steps"], *report["exchange"]):
        assert not each["error"] and 0 < each["seconds"][0] < 60
    assert len(report["exchange"]) == 2 and report["command"] in headline(report)
    assert "| ddp (devices: 2) | " in Path("bench/benchmark.md").read_text()


@pytest.mark.parametrize(("engine", "devices"), [("loop", 1), ("book", 2), ("auto", 1)])
def test_the_timed_steps_come_after_the_warm_up(
    engine: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    configuration = worker.Configuration("LeNet", engine, devices, None, 8, num_steps=4)
    timer = worker.StepTimer(4)
    monkeypatch.setattr(worker, "synchronize", lambda devices: waits.append(timer.num_done))
    if engine == "auto":
        trainer = worker.make_trainer(configuration, timer)
        trainer.fit(worker.make_model("LeNet"), worker.make_loader(configuration, trainer))
    else:
        worker.train_by_hand(configuration, timer)
    assert waits == [3, 7] and timer.num_done == 7 and timer.times[0] < timer.times[1]


def test_plan() -> None:
    words = "--devices 1 2 --replicas 4 --strategies ddp manual_allreduce --models LeNet"
    plan = cli.configurations(cli.parse(words.split()))
    assert [(each.engine, each.devices, each.replicas) for each in plan] == [
        *[("loop", 1, None), ("auto", 1, None), ("ddp", 1, None), ("manual_allreduce", 1, None)],
        *[("book", 2, None), ("ddp", 2, None), ("manual_allreduce", 2, None)],
        *[("book", 1, 4), ("manual_allreduce", 1, 4)],  # ddp has no replicas
    ]
    assert [each.processes for each in plan] == [1, 1, 1, 1, 1, 2, 2, 1, 1]
    assert plan[-1].title == "manual_allreduce (4 replicas on one device)"


def test_the_processes_of_a_measurement_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "num_cores", lambda: 9)
    given = []
    printed = ['{"seconds": 0.5}\n', "RuntimeError: it cannot\nmore\n", "\nlast words\n", ""]

    def run(command: list[str], output: Any) -> int:
        given.append(command)
        output.write(f"some library's line\n{printed.pop(0)}" if len(printed) > 1 else "")
        return 1  # a process that fails at its end has been measured all the same

    monkeypatch.setattr(rounds, "run_in_group", run)
    result = rounds.plan_steps(worker.Configuration("LeNet", "ddp", 2, None, 8, 3, processes=2))
    assert rounds.seconds_per_step(result) == 0.5
    assert given[0][:2] == ["env", "OMP_NUM_THREADS=4"] and result["threads"] == 4
    assert worker.Configuration(**json.loads(given[0][-1])).processes == 2
    for words in ("RuntimeError: it cannot", "last words", "no output"):
        with pytest.raises(RuntimeError, match=words):
            rounds.seconds_per_step(result)


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with another. What fails is not tried again, and Ctrl-C keeps what is done."""
    tried: list[str] = []

    def measure(result: dict[str, Any]) -> float:
        tried.append(result["engine"])
        if result["engine"] == "book":
            raise RuntimeError("no\nport")
        if len(tried) == 9:
            raise KeyboardInterrupt
        return 0.1

    monkeypatch.setattr(cli, "seconds_per_step", measure)
    words = "--run_dir bench --only steps --models LeNet --strategies ddp --repeats 3"
    with pytest.raises(KeyboardInterrupt):
        cli.benchmark_command(words.split())
    first, second, third = ["loop", "auto", "book", "ddp"], ["auto", "ddp", "loop"], ["ddp", "loop"]
    assert tried == first + second + third
    steps = json.loads(Path("bench/benchmark.json").read_text())["steps"]
    assert [each["seconds"] for each in steps] == [[0.1, 0.1], [0.1, 0.1], [], [0.1, 0.1, 0.1]]
    assert [each["error"] for each in steps] == ["", "", "no port", ""]


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that is three times slower in the second round changes nothing."""
    results = [step("loop", [0.05], 1), step("auto", [0.15, 0.45], 1), step("book", [0.05, 0.15])]
    results += [step("ddp", [0.2, 0.6]), step("dp", [0.1, 0.3, 0.1], threads=7)]
    results += [step("other", [], error="no memory")]
    lines = step_tables(results)
    row = "| dp (devices: 2) | 80 | 100.0 (100.0 to 300.0) | 0.50 | 1.50 | 2.00 | 1 x 7 |"
    assert "**LeNet, global batch of 8**" in lines and row in lines
    assert "| one device | 27 | 300.0 (150.0 to 450.0) | 0.33 | 1.00 |  | 1 x" in "\n".join(lines)
    assert lines[-1] == "\nNot measured: other (devices: 2): no memory"
    case = {"k": 4, "size": 1.0, "error": ""}
    ring = {**case, "title": "ring", "seconds": [0.001, 0.003]}
    textbook = {**case, "title": "textbook", "seconds": [0.002, 0.006]}
    [*_, first, second] = exchange_tables([ring, textbook])
    assert first == "| ring | 1.5 x MB | 2 (2.00) |"
    assert second == "| textbook | 3 x MB | 4 (1.00) |"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategies dpp", "dpp: no such strategy"),
        ("--models LeNett --strategies ddp", "model LeNett: take LeNet, ResNet18, or a path"),
        ("--algorithms rng --only exchange", "no allreduce 'rng': take textbook, "),
        ("--algorithms others.forgetful --only exchange", "instead of the sum"),
        ("--run_dir others.py --only exchange --algorithms ring", "File exists"),
        ("--sizes=inf", "--sizes=inf: a number from "),
    ],
)
def test_a_mistake_ends_the_command_at_once(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cli.benchmark_command(words.split())


def test_a_full_disk(main: Callable[..., int], tmp_path: Path, capsys: Any, full_disk: Any) -> None:
    line = "--only=exchange --algorithms=ring --sizes=0.1 --repeats=1 --run_dir=bench"
    assert main("benchmark", *line.split()) == 2
    err = capsys.readouterr().err.partition("error: ")[2]  # torch may warn that there is no GPU
    assert "File too large" in err and err.count("\n") == 1, err
    assert not [*(tmp_path / "bench").iterdir()]
