"""The benchmark's arithmetic, with clocks that are told what time it is."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu.benchmark import Benchmark, Timer, runner
from lightning_mgpu.benchmark.compare import compare, load
from lightning_mgpu.benchmark.parts import PARTS, Parts
from lightning_mgpu.benchmark.plan import Configuration, configurations, interleaved
from lightning_mgpu.benchmark.report import HEAD, draw, over_repeats, parts, ratio, tables
from lightning_mgpu.benchmark.runner import MeasurementError, environment, run_plan
from lightning_mgpu.runs.errors import UsageError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def measurement(step: float, samples: int = 256) -> dict[str, Any]:
    own = {**dict.fromkeys(PARTS, 0.0), "forward": 0.25 * step, "framework": 0.75 * step}
    return {"step": step, "samples": samples, "parts": own, "memory": 2.0**20, "threads": 2}


def result(engine: str, steps: list[float | None], devices: int = 2, batch_size: int = 256, **more: Any) -> Any:
    repeats = [None if step is None else measurement(step, batch_size) for step in steps]
    configuration = vars(Configuration(engine, "LeNet", devices, batch_size, **more))
    return {"configuration": configuration, "repeats": repeats, "error": None}


def cells(results: list[Any], engine: str) -> list[dict[str, str]]:
    """The rows of an engine, by the table's head."""
    rows = [line.strip("| ").split("|") for line in tables(results) if line.startswith(f"| {engine}")]
    return [dict(zip(HEAD, (cell.strip() for cell in row))) for row in rows]


def test_timer_and_benchmark(capsys: pytest.CaptureFixture) -> None:
    clock = Clock()
    timer = Timer(clock)
    for seconds in (1.0, 3.0):
        timer.start()
        clock.now += seconds
        assert timer.stop() == seconds
        clock.now += 50  # between two stretches
    assert (timer.times, timer.sum(), timer.avg(), timer.cumsum()) == ([1.0, 3.0], 4.0, 2.0, [1.0, 4.0])
    with Benchmark("nothing") as benchmark:
        pass
    assert capsys.readouterr().out == f"nothing: {benchmark.seconds:.4f} sec\n"


def test_parts_add_up_to_the_step_and_one_inside_another_counts_once() -> None:
    clock = Clock()
    watch = Parts(clock)

    def step() -> None:
        clock.now += 0.5  # of the framework
        with watch.profile("run_training_batch"), watch.profile("[LightningModule]LeNet.optimizer_step"):
            clock.now += 1
            with watch.profile("[Strategy]DDPStrategy.training_step"):
                clock.now += 2
            with watch.profile("[Strategy]DDPStrategy.backward"):
                clock.now += 4
                with watch.profile("allreduce"):
                    clock.now += 8

    step()  # not watched yet
    watch.is_on, start = True, clock.now
    step()
    step()
    found = watch.of_step(clock.now - start, num_steps=2)
    assert list(found) == list(PARTS)
    expected = {"update": 1, "forward": 2, "backward": 4, "allreduce": 8, "framework": 0.5}
    assert found == {**dict.fromkeys(PARTS, 0.0), **expected}


def test_ratios_and_differences_are_taken_within_a_repeat() -> None:
    """A machine that is three times slower in the second repeat changes nothing."""
    fast, slow = result("dp", [0.1, 0.3, 0.1, 0.1]), result("ddp", [0.2, 0.6, None, 0.9])
    assert over_repeats(ratio, fast, slow) == pytest.approx(2)
    assert over_repeats(ratio, fast, result("ddp", [None] * 4)) is None and over_repeats(ratio, fast, None) is None
    assert over_repeats(ratio, result("dp", [0.2, 0.6], batch_size=512), slow) == pytest.approx(2)  # samples, not steps
    results = [result("auto", [0.15, 0.45], 1), result("book", [0.05, 0.25]), fast, slow]
    [row] = cells(results, "dp")
    assert row["/ `ddp`"] == "2.00" and row["/ one device"] == "1.50" and row["efficiency"] == "0.75"
    assert (
        row["ms above the book's loop"] == "50.0" and row["ms a step (lowest to highest)"] == "100.0 (100.0 to 300.0)"
    )
    assert cells(results, "the book")[0]["ms above the book's loop"] == ""
    assert sum(parts(fast).values()) == pytest.approx(0.1) and parts(fast)["forward"] == pytest.approx(0.025)


def test_weak_scaling_is_compared_with_one_device_at_the_given_batch() -> None:
    one = [result("auto", [0.1], 1, 100), result("auto", [0.15], 1, 200), result("dp", [0.1], 2, 200)]
    assert cells(one, "dp")[0]["efficiency"] == "1.00"


def test_milliseconds_of_a_further_replica() -> None:
    steps = {2: [0.10, 0.30], 4: [0.12, 0.32], 8: [0.16, 0.36]}
    results = [result("book", [0.1, 0.3], 1, replicas=r) for r in steps]
    results += [result("manual_allreduce", seconds, 1, replicas=r) for r, seconds in steps.items()]
    text = "\n".join(tables(results))
    assert "manual_allreduce: 10.00 ms a further replica." in text
    assert cells(results, "manual_allreduce (8 replicas on 1 device)")[0]["ms above the book's loop"] == "60.0"


def plan(**given: Any) -> list[tuple[Any, ...]]:
    defaults = {"models": ["LeNet"], "batch_size": 64, "accelerator": "cpu", "scaling": "strong", "replicas": []}
    found = configurations(argparse.Namespace(**{**defaults, "strategies": ["ddp", "dp"], "devices": [2], **given}))
    return [(each.engine, each.devices, each.batch_size, each.replicas) for each in found]


def test_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    strong = plan(devices=[1, 2, 4])
    assert strong[:2] == [("loop", 1, 64, None), ("auto", 1, 64, None)]
    assert strong[2:] == [(engine, k, 64, None) for k in (2, 4) for engine in ("book", "ddp", "dp")]
    assert plan(scaling="weak")[2:] == [
        *((engine, 1, 128, None) for engine in ("loop", "auto")),
        *((engine, 2, 128, None) for engine in ("book", "ddp", "dp")),
    ]
    assert (
        plan(replicas=[2], strategies=["ddp"]) == plan(strategies=["ddp"])
        and "none of the strategies has an option" in capsys.readouterr().out
    )
    strategies = ["ddp", "manual_allreduce"]
    rows = plan(strategies=strategies, replicas=[2, 8])[-4:]
    assert rows == [(engine, 1, 64, r) for r in (2, 8) for engine in ("book", "manual_allreduce")]


def test_every_repeat_begins_with_another() -> None:
    order = interleaved("abc", 4)
    assert "".join(each for _, each in order) == "abcbcacababc" and [n for n, _ in order[::3]] == [0, 1, 2, 3]


def test_cores_are_shared_out_and_the_allocator_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)  # of a larger machine
    assert environment(Configuration("ddp", devices=2), "default")["OMP_NUM_THREADS"] == "4"
    assert environment(Configuration("dp", devices=2), "default")["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not any(name.startswith("MALLOC_") for name in environment(Configuration("dp"), "default"))
    assert environment(Configuration("dp"), "keep")["MALLOC_MMAP_MAX_"] == "0"


def test_warns_of_other_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(runner, "num_cores", lambda: 2)
    for now, own, warned in ((1.9, 0, False), (2.4, 0, True), (2.4, 1, False), (3.4, 1, True)):
        monkeypatch.setattr("os.getloadavg", lambda now=now: (now, 0.0, 0.0))
        assert runner.load("now", own) == now
        assert (f"warning: load {now} on 2 cores now" in capsys.readouterr().out) == warned


def test_what_fails_is_not_tried_again_and_has_no_figures() -> None:
    tried, results = [], list[Any]()

    def measure(configuration: Configuration) -> dict[str, Any]:
        tried.append(configuration.engine)
        if configuration.engine == "ddp":
            raise MeasurementError("LeNet/ddp/2/256: no port")
        return measurement(0.1)

    run_plan([Configuration("loop", devices=1), Configuration("ddp")], 2, measure, results)
    assert tried == ["loop", "ddp", "loop"]
    [row] = [line for line in tables(results) if line.startswith("| ddp")]
    assert row == "| ddp (2 devices) | 256" + " | " * 9 + " |"
    assert "Not measured: LeNet/ddp/2/256: no port." in "\n".join(tables(results))


def test_picture(tmp_path: Path) -> None:
    machine = {"gpus": [], "cores": 2, "cpu": "a CPU", "malloc": "default"}
    draw([result("auto", [0.2], 1), result("dp", [0.1]), result("ddp", [None])], machine, tmp_path)
    assert (tmp_path / "parts_LeNet.png").read_bytes().startswith(b"\x89PNG")
    draw([result("dp", [None])], machine, tmp_path / "nothing to draw")


def test_compare(tmp_path: Path) -> None:
    old, new = ({"results": [result("dp", [step, step])], "machine": {"torch": step}} for step in (0.2, 0.1))
    lines = compare(old, new)
    assert lines[1].split() == ["LeNet/dp/2/256", "1,280", "2,560", "2.00"]
    assert lines[2] == "not the same machine: torch: 0.2 and 0.1"
    wide = {**old, "results": [result("dp", [0.1, 0.3])]}
    assert compare(wide, new)[1].endswith("within the spread")
    with pytest.raises(UsageError, match="no configuration in common"):
        compare(old, {**new, "results": [result("ddp", [0.1])]})
    path = tmp_path / "report.json"
    for content in ("", "[]", "{}", "3"):
        path.write_text(content)
        with pytest.raises(UsageError, match="no report of the benchmark"):
            load(str(path))
    path.write_text(json.dumps(old))
    assert load(str(path)) == old
    before = Path(__file__).parents[2] / "docs" / "benchmark" / "lenet.json"  # of an older version
    assert compare(load(str(before)), load(str(before)))[1].startswith("LeNet/loop/1/256 ")
