"""`python -m lightning_mgpu benchmark`: what it leaves behind, and what ends it."""

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_mgpu.benchmark import cli, directory
from lightning_mgpu.benchmark.cores import num_cores
from lightning_mgpu.benchmark.directory import new_directory
from lightning_mgpu.benchmark.parts import PARTS

SMALL = (
    *("--source=synthetic", "--models=LeNet", "--devices=2", "--batch_size=16", "--num_steps=2", "--accelerator=cpu"),
    *("--no-exchange", "--no-wandb", "--run_dir=bench"),
)


@pytest.mark.slow
def test_report(command: Any, tmp_path: Path) -> None:
    base = "lightning_mgpu.strategies.ManualAllreduceStrategy"
    (tmp_path / "mine.py").write_text(f"import lightning_mgpu.strategies\nclass Mine({base}): pass\n")
    strategies = ("--strategies", "auto", "ddp", "dp", "manual_allreduce", "mine.Mine")
    code, out, err = command("benchmark", *SMALL, *strategies, "--repeats=1", timeout=280)
    assert code == 0, err
    assert "7 configurations, 1 repeats: about " in out and "report: bench/benchmark.md" in out
    report = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert report["machine"]["cores"] == num_cores() and report["machine"]["malloc"] == "default"
    assert len(report["results"]) == 7
    for result in report["results"]:
        [measured] = result["repeats"]
        assert measured["step"] > 0 and measured["memory"] > 2**20 and list(measured["parts"]) == list(PARTS)
        assert all(measured["parts"][part] > 0 for part in ("data", "forward", "backward", "update"))
        by_hand = result["configuration"]["engine"] in ("dp", "manual_allreduce", "book", "mine.Mine")
        assert (measured["parts"]["allreduce"] > 0) == by_hand
    assert (tmp_path / "bench" / "benchmark.md").read_text() in out
    assert (tmp_path / "bench" / "parts_LeNet.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command("benchmark", "compare", "bench/benchmark.json", "bench/benchmark.json")
    assert code == 0 and out.count("1.00  within the spread") == 7
    code, _, err = command("benchmark", *SMALL)
    assert code == 2 and "--run_dir=bench exists" in err


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(command: Any, tmp_path: Path) -> None:
    process = command.start("benchmark", *SMALL, "--strategies", "manual_allreduce", "--repeats=50")
    killer = threading.Timer(120, process.kill)
    killer.start()
    while (line := process.stdout.readline()) and not line.startswith("3/"):
        pass
    killer.cancel()
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = command.finish(process, timeout=60)
    assert code == 130 and "interrupted" in out and "Traceback" not in err
    report = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    measured = [repeat for result in report["results"] for repeat in result["repeats"] if repeat]
    assert len(measured) == 2
    assert not (tmp_path / "bench" / ".benchmark.json").exists()


def test_a_new_directory(main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two begun in the same second have one each; `~` is the home directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 2, 3, 4, 5))
    monkeypatch.setattr(directory, "datetime", clock)
    found = [new_directory(given, "benchmark") for given in (None, None, "~/mine/a")]
    names = ("2026-01-02_03-04-05_benchmark", "2026-01-02_03-04-05_benchmark_2")
    assert found == [Path("runs", name) for name in names] + [tmp_path / "mine" / "a"]
    assert all(path.is_dir() for path in found)


@pytest.mark.parametrize("tool", [("--source=synthetic", "--quick"), ("time_to_accuracy", "--target=0.9")])
@pytest.mark.parametrize(("given", "said"), [("file", "exists and is not empty"), ("file/x", "cannot be made")])
def test_a_directory_that_cannot_be(
    tool: tuple[str, ...],
    given: str,
    said: str,
    main: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    assert main("benchmark", *tool, f"--run_dir={given}") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert given in line and said in line


@pytest.mark.parametrize(
    ("given", "models", "repeats", "num_steps"),
    [((), ["LeNet"], 2, 10), (("--models", "ResNet18", "--repeats", "5"), ["ResNet18"], 5, 10)],
)
def test_quick_leaves_what_is_given(
    given: tuple[str, ...],
    models: list[str],
    repeats: int,
    num_steps: int,
    main: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "_measure", lambda args, *others: seen.append(args))
    monkeypatch.setattr(cli, "_finish", lambda *args: None)
    assert main("benchmark", "--quick", "--source=synthetic", *given) == 0
    assert [(args.models, args.repeats, args.num_steps) for args in seen] == [(models, repeats, num_steps)]


def test_no_secret_is_written_down(main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_measure", lambda *args: None)
    assert main("benchmark", *SMALL, "--root=https://bob:hunter2@host") == 0
    for path in (tmp_path / "bench").iterdir():
        assert "hunter2" not in path.read_text() and "https://***@host" in path.read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--strategies", "dpp"], ["--strategies dpp: no such strategy", "manual_allreduce"]),
        (["--models", "LeNett"], ["--models LeNett: ", "did you mean LeNet?", "give LeNet, ResNet18 or a path"]),
        (["--models", "lenet", "--repeats", "0"], ["--models lenet: no LightningModule (did you mean LeNet?)"]),
        (["--models", "torch.nn.Linear", "--repeats", "0"], ["--models torch.nn.Linear: no LightningModule"]),
        (["--models", "missing.Model"], ["--models missing.Model: No module named 'missing'"]),
        (["--run_di=x", "--repeats", "0"], ["unrecognized arguments: --run_di=x"]),
        (["--devices", "0"], ["--devices", "1 or more"]),
        (["--repeats", "0"], ["--repeats=0", "1 or more"]),
        (["--repeats", "many"], ["--repeats", "many"]),
        (["--accelerator=gpu", "--devices", "99"], ["--devices 99", "GPUs"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["compare", "a.json"], ["compare takes two reports"]),
        (["compare", "a.json", "b.json"], ["a.json: No such file"]),
    ],
)
def test_mistake_ends_in_one_line(
    args: list[str], words: list[str], main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main("benchmark", *args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)
    assert list(tmp_path.iterdir()) == []
