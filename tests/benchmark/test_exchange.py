"""The allreduce functions alone: what is called, and the table."""

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
