"""The benchmark's plan and arithmetic, with clocks that are told what time it is."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mgpu.benchmark import exchange, processes
from lightning_mgpu.benchmark.cost import cost_table
from lightning_mgpu.benchmark.parts import PARTS, Parts, finished_clock
from lightning_mgpu.benchmark.plan import Configuration, configurations
from lightning_mgpu.benchmark.processes import measure
from lightning_mgpu.benchmark.report import HEAD, describe, part_seconds, tables


def measurement(step: float) -> dict[str, Any]:
    parts = {"forward": 0.25 * step, "strategy": 0.05 * step, "framework": 0.7 * step}
    return {"step": step, "parts": {**dict.fromkeys(PARTS, 0.0), **parts}}


def result(engine: str, steps: list[float | None], devices: int = 2, **more: Any) -> Any:
    repeats = [None if step is None else measurement(step) for step in steps]
    configuration = vars(Configuration(engine, "LeNet", devices, **more))
    return {"configuration": configuration, "repeats": repeats, "error": None}


def cells(results: list[Any], engine: str) -> dict[str, str]:
    """The last row of an engine, by the table's head."""
    rows = [line[1:-1].split("|") for line in tables(results) if line.startswith(f"| {engine}")]
    return dict(zip(HEAD, (cell.strip() for cell in rows[-1])))


def test_parts_add_up_to_the_step_and_one_inside_another_counts_once() -> None:
    now = 100.0
    watch = Parts(lambda: now)

    def step() -> None:
        nonlocal now
        now += 0.5  # of the framework
        update = watch.profile("[LightningModule]LeNet.optimizer_step")
        with watch.profile("run_training_batch"), update:
            now += 1
            with watch.profile("[Strategy]DDPStrategy.training_step"):
                now += 2
            with watch.profile("[Strategy]DDPStrategy.backward"):
                now += 4
                with watch.profile("allreduce"):
                    now += 8

    step()  # not watched yet
    watch.is_on, start = True, now
    step()
    step()
    found = watch.of_step(now - start, num_steps=2)
    expected = {"update": 1, "forward": 2, "backward": 4, "allreduce": 8, "framework": 0.5}
    assert found == {**dict.fromkeys(PARTS, 0.0), **expected} and list(found) == list(PARTS)


def test_a_clock_waits_for_its_devices_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs are not waited for, and the wait is where the clock is read, not made."""
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    now = finished_clock(iter([torch.device("cuda:1"), torch.device("cpu")]))
    assert waits == [] and now() <= now() and waits == [torch.device("cuda:1")] * 2


def test_ratios_are_taken_within_a_repeat() -> None:
    """A machine that is three times slower in the second repeat changes nothing."""
    fast, slow = result("dp", [0.1, 0.3, 0.1, 0.1]), result("ddp", [0.2, 0.6, None, 0.9])
    results = [result("auto", [0.15, 0.45], 1), result("book", [0.05, 0.25]), fast, slow]
    row = cells(results, "dp")
    assert row["/ `ddp`"] == "2.00" and row["/ one device"] == "1.50" and row["/ loop"] == ""
    assert row["of it the strategy's own, ms"] == "5.00"
    assert row["ms per step (lowest to highest)"] == "100.0 (100.0 to 300.0)"
    on_one = result("dp", [0.4, 0.4], 1, replicas=8)
    replicas = cells([*results, on_one], "dp (8 replicas on one device)")
    assert replicas["/ one device"] == "0.75" and replicas["/ `ddp`"] == ""
    parts = part_seconds(fast)
    assert sum(parts.values()) == pytest.approx(0.1) and parts["forward"] == pytest.approx(0.025)


def test_a_report_of_before_makes_the_same_table() -> None:
    old = json.loads((Path(__file__).parents[2] / "docs" / "benchmark" / "lenet.json").read_text())
    row = cells(old["results"], "manual_allreduce (2 devices)")
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    assert f"| {' | '.join(['manual_allreduce (2 devices)', *list(row.values())[1:]])} |" in page


def test_plan() -> None:
    def plan(
        devices: list[int], replicas: list[int], processes: Sequence[int] = ()
    ) -> list[tuple[Any, ...]]:
        steps = configurations(["LeNet"], strategies, devices, replicas, processes, 64, 3)
        assert all((each.batch_size, each.num_steps) == (64, 3) for each in steps)
        return [(each.engine, each.devices, each.replicas) for each in steps]

    strategies = ["ddp", "dp"]
    several = [(engine, k, None) for k in (2, 4) for engine in ("book", "ddp", "dp")]
    assert plan([1, 2, 4], []) == [("loop", 1, None), ("auto", 1, None), *several]
    on_one = [(engine, 1, num_replicas) for num_replicas in (2, 8) for engine in ("book", "dp")]
    assert plan([2], [2, 8])[-4:] == on_one
    strategies += ["manual_allreduce"]
    shared = configurations(["LeNet"], strategies, [1, 2, 6], [], [2, 4], 64, 3)
    assert [(each.engine, each.devices, each.processes) for each in shared if each.processes] == [
        ("manual_allreduce", 2, 2),
        ("manual_allreduce", 6, 2),
    ], "dp stays in one process"
    assert describe(vars(shared[-1])) == "manual_allreduce (6 devices, 2 processes)"


def test_every_repeat_begins_with_another_and_what_fails_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, results = [], list[Any]()

    def run_worker(worker: str, arguments: dict[str, Any]) -> Any:
        tried.append(arguments["engine"])
        return (None, "no port") if arguments["engine"] == "ddp" else (measurement(0.1), None)

    monkeypatch.setattr(processes, "run_worker", run_worker)
    engines = {name: vars(Configuration(name, devices=1)) for name in ("loop", "ddp", "auto")}
    measure("steps", engines, 3, results)
    assert tried == ["loop", "ddp", "auto", "auto", "loop", "auto", "loop"]
    assert "| ddp | 256" + " | " * (len(HEAD) - 2) + " |" in tables(results)
    assert tables(results)[-1] == "\nNot measured: ddp: no port."


def test_an_allreduce_alone_gets_the_gradients_of_every_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    cases = exchange.cases_of([4096], [model])
    found = {name: [list(shape) for shape in shapes] for name, shapes in cases.items()}
    assert found == {
        "4 kB": [[1024]],
        "Sequential": [[5, 3], [5], [2, 5]],
        "Sequential, flat": [[30]],
    }


def test_own_cost_is_what_remains_and_a_disturbed_repeat_changes_nothing() -> None:
    names = ("two_devices", "one_device", "second_device")
    seconds = [(5e-3, 1.2e-3, 1.1e-3), (4.5e-3, 1e-3, 1.25e-3), (9.5e-3, 8e-3, 9e-3)]
    rounds = [{"dp, 4 layers": dict(zip(names, each))} for each in (*seconds, seconds[2])]
    found = {"repeats": [{"rounds": rounds}], "error": None}
    assert "| dp, 4 layers | 5.00 | 1.20 | 1.25 | 2.55 |" in cost_table([found])
    failed = {"repeats": [None], "error": "the engine's own cost: no memory"}
    assert cost_table([failed]) == ["\nNot measured: the engine's own cost: no memory."]
