"""The allreduce functions alone: what is called, processes of their own, the table and the picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.benchmark import exchange, exchange_worker
from lightning_mgpu.benchmark.exchange import cases_of, exchange_tables, measure_exchange, plot_exchange
from lightning_mgpu.benchmark.processes import MeasurementError

CASES = cases_of([4096], [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))])


def test_cases() -> None:
    assert CASES == {"4 kB": [[1024]], "Sequential": [[5, 3], [5], [2, 5]], "Sequential, flat": [[30]]}


def test_a_function_gets_the_gradients_of_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fake(tensors: list[Tensor]) -> None:
        seen.append([tuple(tensor.shape) for tensor in tensors])

    monkeypatch.setitem(exchange_worker.ALGORITHMS, "fake", fake)
    assert 0 < exchange_worker.time_function("fake", [[2, 3], [4]], [torch.device("cpu")] * 2, 0.001) < 1
    assert seen[:2] == seen[-2:] == [[(2, 3)] * 2, [(4,)] * 2]


def test_compiled_functions_and_ones_own_have_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a ratio is that of one repeat, so that a machine that is three times slower in the second changes nothing."""
    orders: list[dict[str, Any]] = []

    def fake(command: Sequence[str], what: str) -> list[dict[str, Any]]:
        order = exchange.json.loads(command[-1])
        orders.append(order)
        slower = 3.0 if len(orders) > 4 else 1.0
        if order["names"] == [exchange.DISTRIBUTED]:
            raise MeasurementError("torch.distributed: no port")
        times = {name: slower * (0.001 if name == "compiled" else 0.002) for name in order["names"]}
        return [{"case": case, "times": times} for case in order["cases"]]

    monkeypatch.setattr(exchange, "output_of", fake)
    rows, problems = measure_exchange(["textbook", "compiled", "my.own"], CASES, [2], 0.1, 2)
    groups = [["textbook", exchange.LIMIT], ["compiled"], ["my.own"], [exchange.DISTRIBUTED]]
    assert [order["names"] for order in orders[:4]] == groups
    assert list(orders[3]["cases"]) == ["4 kB", "Sequential, flat"] and problems == ["torch.distributed: no port"]
    lines = exchange_tables(rows)
    assert lines[1] == "**The allreduce alone: 4 kB**" and lines.count("| compiled | 2.000 | 2.00 | 2.00 |") == 3


@pytest.mark.slow
def test_gloo_and_a_compiled_function_in_real_processes(tmp_path: Path) -> None:
    rows, problems = measure_exchange(["textbook", "compiled"], {"4 kB": [[1024]]}, [2], 0.01, 1)
    assert {row["algorithm"] for row in rows} == {"textbook", "compiled", exchange.LIMIT, "gloo"} and problems == []
    assert all(0 < row["repeats"][0] < 10 for row in rows)
    plot_exchange(rows, tmp_path / "exchange.png")
    assert (tmp_path / "exchange.png").read_bytes().startswith(b"\x89PNG")
