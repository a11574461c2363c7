"""The allreduce functions alone: what is called, the table and the picture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.benchmark import exchange
from lightning_mgpu.benchmark.exchange import LIMIT, cases_of, exchange_tables


def test_a_function_gets_the_gradients_of_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    cases = cases_of([4096], [model])
    found = {name: [list(shape) for shape in shapes] for name, shapes in cases.items()}
    assert found == {"4 kB": [[1024]], "Sequential": [[5, 3], [5], [2, 5]], "Sequential, flat": [[30]]}
    seen: list[Any] = []

    def fake(tensors: list[Tensor]) -> None:
        seen.append([list(tensor.shape) for tensor in tensors])

    monkeypatch.setitem(exchange.ALGORITHMS, "fake", fake)
    assert 0 < exchange.time_function("fake", cases["Sequential"], [torch.device("cpu")] * 2, 0.001) < 1
    assert seen[:3] == seen[-3:] == [[[5, 3]] * 2, [[5]] * 2, [[2, 5]] * 2]


def test_a_ratio_is_that_of_one_repeat() -> None:
    """A machine that is three times slower in the second one changes nothing."""

    def result(name: str, seconds: float, error: str | None = None) -> Any:
        repeats = [{"4 kB": {"num_tensors": 1, "bytes": 4096, "2": slower * seconds}} for slower in (1, 3)]
        configuration = {"algorithm": name, "ks": [2]}
        return {"configuration": configuration, "repeats": [None, None] if error else repeats, "error": error}

    results = [result("textbook", 0.002), result("ring", 0.001), result(LIMIT, 0.002), result("tree", 0, "tree: no")]
    lines = exchange_tables(results)
    assert lines[1] == "**The allreduce alone: 4 kB**" and "| ring | 2.000 | 2.00 | 2.00 |" in lines
    assert "| tree |  |  |  |" in lines and lines[-1] == "\nNot measured: tree: no."


@pytest.mark.slow
def test_functions_in_real_processes(command: Callable, tmp_path: Path) -> None:
    sizes = ("--quick", "--sizes", "4096", "1048576", "--seconds=0.01", "--repeats=1")
    (tmp_path / "mine.py").write_text("from lightning_mgpu.allreduce import ring_allreduce as ring\n")
    names = ["textbook", "mine.ring"]
    code, out, err = command("benchmark", "--only=exchange", "--run_dir=bench", *sizes, "--algorithms", *names)
    assert code == 0, err
    report = json.loads((tmp_path / "bench" / "benchmark.json").read_text())
    assert report["results"] == [] and (tmp_path / "bench" / "exchange.png").read_bytes().startswith(b"\x89PNG")
    assert [result["configuration"]["algorithm"] for result in report["exchange"]] == [*names, LIMIT]
    for result in report["exchange"]:
        [found] = result["repeats"]
        assert list(found) == ["4 kB", "1 MB", "LeNet", "LeNet, flat"]
        assert all(0 < case["2"] < 10 for case in found.values())
    assert "**The allreduce alone: LeNet, flat**" in out
