"""The benchmark's arithmetic, with clocks that are told what time it is."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mgpu.benchmark import Benchmark, Timer, worker
from lightning_mgpu.benchmark.compare import compare, load
from lightning_mgpu.benchmark.parts import PARTS, Parts, PartsProfiler
from lightning_mgpu.benchmark.plan import Configuration, configurations, interleaved
from lightning_mgpu.benchmark.references import book_step, loop_step, run_steps
from lightning_mgpu.benchmark.report import _one_device, _plot_scaling, plot, to_markdown
from lightning_mgpu.benchmark.runner import MeasurementError, environment, expected_seconds, run_plan
from lightning_mgpu.benchmark.summary import efficiency, ratio, summarise
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.errors import UsageError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def measurement(step: float, samples: int = 256, forward: float = 0.5) -> dict[str, Any]:
    parts = {**dict.fromkeys(PARTS, 0.0), "forward": forward * step, "framework": (1 - forward) * step}
    return {"step": step, "samples": samples, "parts": parts, "memory": 2.0**20, "threads": 2}


def result(engine: str, steps: list[float | None], devices: int = 2, batch_size: int = 256) -> dict[str, Any]:
    configuration = Configuration(engine, "LeNet", devices, batch_size)
    repeats = [None if step is None else measurement(step, batch_size) for step in steps]
    return {"configuration": configuration.asdict(), "repeats": repeats, "error": None}


def report(*results: dict[str, Any], **machine: Any) -> dict[str, Any]:
    known = {
        "date": "2026-01-01",
        "cpu": "a CPU",
        "cores": 2,
        "gpus": [],
        "malloc": "default",
        "torch": "2",
        "lightning": "2",
    }
    return {
        "command": "benchmark",
        "machine": {**known, **machine},
        "options": {"repeats": 2},
        "results": list(results),
    }


def test_memory_is_added_up_on_the_device() -> None:
    """`meta` stands in for a GPU: when training is over the model is on the CPU, of which NCCL takes nothing."""

    def reduce(tensor: Any, reduce_op: str) -> Any:
        assert tensor.device.type == "meta" and reduce_op == "sum"
        return torch.tensor(7.0)

    strategy = SimpleNamespace(root_device=torch.device("meta"), reduce=reduce)
    assert worker._memory_of_all(SimpleNamespace(strategy=strategy)) == 7.0  # type: ignore[arg-type]


def test_timer() -> None:
    clock = Clock()
    timer = Timer([], clock)
    for seconds in (1.0, 3.0):
        timer.start()
        clock.now += seconds
        assert timer.stop() == seconds
        clock.now += 50  # between two stretches
    assert (timer.times, timer.sum(), timer.avg(), timer.cumsum()) == ([1.0, 3.0], 4.0, 2.0, [1.0, 4.0])


def test_benchmark_prints(capsys: pytest.CaptureFixture) -> None:
    with Benchmark("nothing") as benchmark:
        pass
    assert capsys.readouterr().out == f"nothing: {benchmark.seconds:.4f} sec\n"


def test_parts_add_up_to_the_step() -> None:
    """And one inside another, the allreduce in the backward pass, counts once."""
    clock = Clock()
    parts = Parts(clock=clock)
    for _ in range(2):
        clock.now += 0.5  # of the framework
        with parts("forward"):
            clock.now += 1
        with parts("backward"):
            clock.now += 2
            with parts("allreduce"):
                clock.now += 4
            clock.now += 8
    found = parts.of_step(total=clock.now - 100, num_steps=2)
    assert list(found) == list(PARTS)
    assert found == {**dict.fromkeys(PARTS, 0.0), "framework": 0.5, "forward": 1, "backward": 10, "allreduce": 4}
    assert sum(found.values()) == 15.5


def test_profiler_counts_between_begin_and_end() -> None:
    clock, profiler = Clock(), PartsProfiler()

    def step() -> None:
        with profiler.profile("run_training_batch"), profiler.profile("[LightningModule]LeNet.optimizer_step"):
            clock.now += 1
            with profiler.profile("[Strategy]DDPStrategy.training_step"):
                clock.now += 2
            with profiler.profile("[Strategy]DDPStrategy.backward"):
                clock.now += 4

    step()
    profiler.begin(parts := Parts(clock=clock))
    step()
    profiler.end()
    step()
    assert dict(parts.seconds) == {"update": 1, "forward": 2, "backward": 4}


def test_summary() -> None:
    summary = summarise(result("ddp", [0.2, 0.5, None, 0.1]))
    assert summary is not None
    assert (summary.step, summary.low, summary.high, summary.repeats) == (0.2, 0.1, 0.5, 3)
    assert summary.rate == pytest.approx(1280)
    assert sum(summary.parts.values()) == pytest.approx(summary.step)
    assert summarise(result("ddp", [None, None])) is None


def test_ratios_are_taken_within_a_repeat() -> None:
    """A machine that is three times slower in the second repeat changes nothing."""
    fast, slow = result("dp", [0.1, 0.3, 0.1]), result("ddp", [0.2, 0.6, None])
    assert ratio(fast["repeats"], slow["repeats"]) == pytest.approx(2)
    assert ratio(result("dp", [0.1, 0.1, 0.1])["repeats"], result("ddp", [0.1, 0.4, 0.2])["repeats"]) == pytest.approx(
        2
    )
    assert ratio(fast["repeats"], result("auto", [None, None, None])["repeats"]) is None
    weak = result("dp", [0.2, 0.6, None], batch_size=512)
    assert ratio(weak["repeats"], slow["repeats"]) == pytest.approx(2)  # samples a second, not steps


def test_efficiency() -> None:
    """Within a repeat: a machine that is three times slower in the second one changes nothing."""
    two, one = result("dp", [0.1, 0.3, 0.1]), result("auto", [0.15, 0.45, None], 1)
    assert efficiency(two["repeats"], one["repeats"], 2) == pytest.approx(0.75)
    assert efficiency(two["repeats"], [None, None, None], 2) is None
    rows = to_markdown(report(one, two)).splitlines()
    assert [row.split(" | ")[7] for row in rows if row.startswith("| dp")] == ["0.75"]


def test_plan() -> None:
    plan = configurations(["ddp", "dp"], ["LeNet"], [1, 2, 4], 64, "cpu", "strong")
    assert [(each.engine, each.devices, each.batch_size) for each in plan] == [
        *(("loop", 1, 64), ("auto", 1, 64), ("book", 2, 64), ("ddp", 2, 64), ("dp", 2, 64)),
        *(("book", 4, 64), ("ddp", 4, 64), ("dp", 4, 64)),
    ]
    weak = configurations(["dp"], ["LeNet"], [2], 64, "cpu", "weak")
    found = {(each.engine, each.batch_size, each.lr_factor) for each in weak}
    assert found == {(engine, 64, 1) for engine in ("loop", "auto")} | {
        (engine, 128, 2) for engine in ("loop", "auto", "book", "dp")
    }


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_learning_rate_of_weak_scaling(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """The first step of a recipe without momentum moves the weights three times as far."""
    moved = []
    for factor in (1, 3):
        torch.manual_seed(0)
        model = LeNet()
        before = model.net[-1].bias.detach().clone()
        monkeypatch.setattr(worker, "make_model", lambda name, model=model: model)
        images = {"source": "synthetic"}
        configuration = Configuration(engine, devices=1, batch_size=8, lr_factor=factor)
        monkeypatch.setattr(worker, "_measurement", lambda *args: {})
        worker.measure(configuration, images, warm_up=1, num_steps=0)
        moved.append(model.net[-1].bias.detach() - before)
    assert moved[0].abs().max() > 0
    torch.testing.assert_close(moved[1], 3 * moved[0])


def test_every_repeat_begins_with_another() -> None:
    plan = configurations(["ddp"], ["LeNet"], [2], 64, "cpu", "strong")
    order = interleaved(plan, 3)
    assert [configuration for _, configuration in order[:: len(plan)]] == plan[:3]
    for repeat in range(3):
        assert {configuration for number, configuration in order if number == repeat} == set(plan)


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)  # of a larger machine
    assert environment(Configuration("ddp", devices=2))["OMP_NUM_THREADS"] == "4"
    assert environment(Configuration("dp", devices=2))["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")  # the same allocator on all sides
    assert not any(name.startswith("MALLOC_") for name in environment(Configuration("dp")))


def test_expected_seconds() -> None:
    plan = [Configuration("loop", devices=1), Configuration("dp")]
    assert expected_seconds(plan, 3, lambda _: (2, 10), {"LeNet": (5.0, 0.5)}) == 2 * 3 * (5 + 22 * 0.5)


def test_what_fails_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, saved = [], []

    def measure(configuration: Configuration, *args: Any) -> dict[str, Any]:
        tried.append(configuration.engine)
        if configuration.engine == "ddp":
            raise MeasurementError("no figures")
        return measurement(0.1)

    monkeypatch.setattr("lightning_mgpu.benchmark.runner.measure_in_process", measure)
    plan = [Configuration("loop", devices=1), Configuration("ddp")]
    found = run_plan(plan, 2, lambda _: (1, 1), {}, "default", saved.append, lambda _: None)
    assert tried.count("ddp") == 1 and tried.count("loop") == 2 and len(saved) == 3
    assert summarise(found[1]) is None and found[1]["error"] == "no figures"
    [row] = [line for line in to_markdown(report(*found)).splitlines() if line.startswith("| ddp")]
    assert row == "| ddp (2 devices) | 256 |  |  |  |  |  |  |  |  |"


def test_table() -> None:
    text = to_markdown(report(result("auto", [0.2, 0.4], 1), result("ddp", [0.1, 0.2]), result("dp", [0.05, 0.1])))
    [row] = [line for line in text.splitlines() if line.startswith("| dp")]
    assert row == "| dp (2 devices) | 256 | 3,413 | 75.0 (50.0 to 100.0) |  | 4.00 | 2.00 | 2.00 | 1 | 2 |"


@pytest.mark.parametrize(("scaling", "efficiencies"), [("strong", ["0.50", "0.25"]), ("weak", ["1.00", "1.00"])])
def test_table_and_picture_agree_on_efficiency(scaling: str, efficiencies: list[str]) -> None:
    """A step of the given batch takes one device 0.1 s, of twice as many samples 0.15 s, and several 0.1 s."""
    plan = configurations(["dp"], ["LeNet"], [2, 4], 100, "cpu", scaling)
    steps = [0.1 if each.devices > 1 or each.batch_size == 100 else 0.15 for each in plan]
    results = [result(each.engine, [step], each.devices, each.batch_size) for each, step in zip(plan, steps)]
    rows = [line.split(" | ") for line in to_markdown(report(*results)).splitlines() if line.startswith("| dp")]
    assert [row[7] for row in rows] == efficiencies
    one = summarise(_one_device(results) or {})
    assert one is not None
    summaries = [summary for each in results if (summary := summarise(each))]
    [axes] = _plot_scaling("LeNet", summaries, one, report()["machine"]).axes
    ideal, dp = axes.lines[0].get_ydata(), next(line for line in axes.lines if line.get_label() == "dp").get_ydata()
    assert [f"{a / b:.2f}" for a, b in zip(dp, ideal)] == ["1.00", *efficiencies]


def test_no_picture_of_scaling_without_one_device(tmp_path: Path) -> None:
    several = [result("dp", [0.1], devices) for devices in (2, 3, 4)]
    assert [path.name for path in plot(report(result("auto", [None], 1), *several), tmp_path)] == ["parts_LeNet.png"]


def test_table_of_the_allreduce_alone() -> None:
    rows = [
        *({"algorithm": "textbook", "k": k, "bytes": 8, "seconds": 0.004} for k in (2, 4)),
        {"algorithm": "ring", "k": 2, "bytes": 8, "seconds": 0.002},
        {"algorithm": "read-modify-write", "k": 2, "bytes": 8, "seconds": 0.001},
        {"algorithm": "gloo", "k": 2, "bytes": 8, "skipped": "no memory"},
    ]
    lines = to_markdown({**report(), "gradients": {"LeNet": rows}}).splitlines()
    assert lines[5] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert "| ring | 2.000 | 2.00 | 0.50 |  |  |  |" in lines
    assert not any("gloo" in line for line in lines)


def test_pictures(tmp_path: Path) -> None:
    one = [result("loop", [0.2], 1), result("auto", [0.2], 1)]
    paths = plot(report(*one, result("dp", [0.1])), tmp_path)
    assert [path.name for path in paths] == ["parts_LeNet.png"]
    paths = plot(report(*one, result("dp", [0.1]), result("dp", [0.05], 4), result("ddp", [None])), tmp_path)
    assert [path.name for path in paths] == ["parts_LeNet.png", "scaling_LeNet.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert plot(report(result("dp", [None])), tmp_path) == []


def test_compare() -> None:
    before, after = report(result("dp", [0.2, 0.2])), report(result("dp", [0.1, 0.1]), torch="3")
    lines = compare(before, after)
    assert lines[1].split()[-3:] == ["1,280", "2,560", "2.00"]
    assert lines[2] == "not the same machine: torch: 2 and 3"
    assert compare(report(result("dp", [0.1, 0.3])), after)[1].endswith("within the spread")
    with pytest.raises(UsageError, match="no configuration in common"):
        compare(before, report(result("ddp", [0.1])))


@pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
def test_files_that_are_no_reports(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(UsageError, match="no report of the benchmark"):
        load(tmp_path / "report.json")
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "missing.json")
    (tmp_path / "report.json").write_text(json.dumps(report()))
    assert load(tmp_path / "report.json")["results"] == []


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_loops_by_hand_train_alike(num_devices: int) -> None:
    """On uneven batches too: the book's loop sums losses and divides by the whole batch."""
    batches = [(torch.randn(7, 1, 28, 28, dtype=torch.float64), torch.arange(7)) for _ in range(3)]
    parts, cpu = Parts(), torch.device("cpu")
    torch.manual_seed(0)
    one = LeNet().double()
    replicas = [copy.deepcopy(one) for _ in range(num_devices)]
    run_steps(batches, loop_step(one, cpu, parts, lr=0.5), 3, parts)
    run_steps(batches, book_step(replicas, parts, lr=0.5), 3, parts)
    for replica in replicas:
        for a, b in zip(one.parameters(), replica.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert set(parts.seconds) == {"data", "transfer", "forward", "backward", "allreduce", "update"}
