"""`python -m lightning_mgpu benchmark`: what is measured in this process, what the command leaves, and what ends it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_mgpu.benchmark import cli, worker
from lightning_mgpu.benchmark.parts import PARTS, Parts
from lightning_mgpu.benchmark.plan import Configuration
from lightning_mgpu.benchmark.references import book_step, loop_step
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet

BY_PATH = "lightning_mgpu.strategies.ManualAllreduceStrategy"
SMALL = ("--source=synthetic", "--models=LeNet", "--devices=2", "--batch_size=16", "--num_steps=2", "--accelerator=cpu")


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_loops_by_hand_train_alike(num_devices: int) -> None:
    """On uneven batches too: the book's loop sums losses and divides by the whole batch."""
    batches = [(torch.randn(7, 1, 28, 28, dtype=torch.float64), torch.arange(7)) for _ in range(3)]
    torch.manual_seed(0)
    one, parts = LeNet().double(), Parts()
    replicas = [copy.deepcopy(one) for _ in range(num_devices)]
    steps = loop_step(one, torch.device("cpu"), parts, lr=0.5), book_step([*replicas], parts, lr=0.5)
    for batch in batches:
        for step in steps:
            step(batch)
    for replica in replicas:
        for a, b in zip(one.parameters(), replica.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("engine", "devices"),
    [("loop", 1), ("auto", 1), *((name, 2) for name in ("book", "dp", "manual_allreduce_foreach", BY_PATH))],
)
def test_a_measurement(engine: str, devices: int) -> None:
    configuration = Configuration(engine, devices=devices, batch_size=8)
    data = FashionMNIST(batch_size=8, source="synthetic")
    measure = worker.train_by_hand if engine in ("loop", "book") else worker.train
    found: Any = measure(configuration, data, 2)
    assert list(found["parts"]) == list(PARTS) and found["step"] > 0 and found["memory"] > 2**20
    assert all(found["parts"][part] > 0 for part in ("data", "forward", "backward", "update"))
    assert (found["parts"]["allreduce"] > 0) == (engine in ("book", "manual_allreduce_foreach", BY_PATH))


def test_replicas_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replicas(SingleDeviceStrategy):
        def __init__(self, replicas: int) -> None:
            super().__init__()
            self.given = replicas

    monkeypatch.setattr(worker, "find_strategy", lambda name: (Replicas, {}))
    strategy: Any = worker.make_strategy(Configuration("mine", devices=1, replicas=4), Parts())
    assert strategy.given == 4


def test_stretches_of_two_seconds_and_of_as_many_steps_everywhere() -> None:
    now = 0.0
    parts = Parts(lambda: now)
    stretches, is_last, watched = worker.Stretches(parts), False, []
    while not is_last:
        now += 7.0 if stretches.count == 0 else 0.1  # compiles
        watched.append(parts.is_on)
        is_last = stretches.step_done(agree=lambda num_steps: num_steps + 1)  # as the first process says
    assert stretches.num_steps == 21 and watched == [False] * 24 + [True] * 21 and not parts.is_on
    assert stretches.result(8, 0.0)["step"] == pytest.approx(0.1)


@pytest.mark.slow
def test_report(command: Callable, tmp_path: Path) -> None:
    options = ("--only=steps", "--repeats=1", "--run_dir=bench", "--strategies", "ddp")
    code, out, err = command("benchmark", *SMALL, *options, timeout=280)
    assert code == 0, err
    report = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert report["machine"]["malloc"] == "default" and report["exchange"] == []
    assert [result["error"] for result in report["results"]] == [None] * 4
    assert all(result["repeats"][0]["step"] > 0 for result in report["results"])
    assert (tmp_path / "bench" / "benchmark.md").read_text() in out
    assert (tmp_path / "bench" / "parts_LeNet.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_is_done(main: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: Any, repeats: int, measure: Any, results: list[Any]) -> None:
        results.append({"configuration": vars(plan[0]), "repeats": [None], "error": "not yet"})
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_plan", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main("benchmark", *SMALL, "--run_dir=bench", "--root=https://bob:hunter2@host") == 130
    assert len(json.loads(Path("bench/benchmark.json").read_text())["results"]) == 1
    assert all("hunter2" not in path.read_text() for path in Path("bench").iterdir())


def test_quick_leaves_what_is_given() -> None:
    assert (quick := cli.parse(["--quick"])).models == ["LeNet"] and quick.repeats == 2 and quick.num_steps == 10
    given = cli.parse(["--quick", "--models", "ResNet18", "--repeats", "5"])
    assert (given.models, given.repeats, given.num_steps) == (["ResNet18"], 5, 10)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategies", "dpp"], ["--strategies dpp: no such strategy", "manual_allreduce"]),
        (["--models", "LeNett"], ["--models LeNett: ", "take LeNet, ResNet18, or a path"]),
        (["--models", "torch.nn.Linear"], ["--models torch.nn.Linear: no LightningModule"]),
        (["--algorithms", "rng"], ["--algorithms rng: ", "choose from textbook, "]),
        (["--algorithms", "my_exchange.forgetful"], ["my_exchange.forgetful", "instead of the sum"]),
        (["--devices", "0"], ["--devices", "above 0"]),
        (["--repeats", "0"], ["--repeats 0", "above 0"]),
        (["--accelerator=gpu", "--devices", "99"], ["--devices 99", "GPUs"]),
        (["--run_di=x"], ["unrecognized arguments: --run_di=x"]),
        (["--source=synthetic", "--run_dir=my_exchange.py"], ["--run_dir=my_exchange.py cannot be made"]),
        (["compare", "a.json"], ["compare takes two reports"]),
        (["compare", "a.json", "b.json"], ["a.json: No such file"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str], words: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "my_exchange.py").write_text("def forgetful(data):\n    data[0].add_(data[1])\n")
    assert main("benchmark", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert {path.name for path in tmp_path.iterdir()} <= {"my_exchange.py", "__pycache__"}
