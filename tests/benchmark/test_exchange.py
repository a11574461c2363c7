"""The allreduce functions alone: turns on a fake clock, processes of their own, the table and the picture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.benchmark import exchange, exchange_worker
from lightning_mgpu.benchmark.exchange import cases_of, exchange_tables, measure_exchange, plot_exchange
from lightning_mgpu.benchmark.runner import MeasurementError


def test_calls_take_turns() -> None:
    now, order = 0.0, []

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return call

    found = exchange_worker.time_in_turns({"a": takes("a", 1.0), "b": takes("b", 3.0)}, 1.0, clock=lambda: now)
    assert found == {"a": 1.0, "b": 3.0}
    turns = [name for i, name in enumerate(order[2:]) if name != order[1 + i]]  # after the warm-up
    assert "".join(turns[:4]) in ("abab", "baba") and len(turns) >= exchange_worker.ROUNDS


def test_functions_get_all_gradients_and_limits_touch_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fake(tensors: list[Tensor]) -> None:
        seen.append([tensor.shape for tensor in tensors])

    monkeypatch.setitem(exchange_worker.ALGORITHMS, "fake", fake)
    calls: dict[str, Callable[[], None]] = {}
    monkeypatch.setattr(exchange_worker, "time_in_turns", lambda given, seconds: calls.update(given) or {})
    names = ["fake", "copy", "read-modify-write"]
    exchange_worker.time_functions(names, [[2, 3], [4]], [torch.device("cpu")] * 2, 0.1)
    calls["fake"]()
    assert seen == [[(2, 3)] * 2, [(4,)] * 2]
    elsewhere, gradients = calls["copy"].args  # type: ignore[attr-defined]
    calls["copy"]()
    assert all(tensor.eq(0).all() for same in elsewhere for tensor in same)
    versions = [tensor._version for same in gradients for tensor in same]
    calls["read-modify-write"]()
    assert [tensor._version for same in gradients for tensor in same] == [version + 1 for version in versions]


CASES = cases_of([4096], [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))])


def test_cases() -> None:
    assert CASES == {"4 kB": [[1024]], "Sequential": [[5, 3], [5], [2, 5]], "Sequential, flat": [[30]]}


def test_compiled_functions_and_ones_own_have_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a ratio is that of one repeat, so that a machine that is three times slower in the second changes nothing."""
    orders: list[dict[str, Any]] = []

    def fake(order: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        orders.append(order)
        slower = 3.0 if len(orders) > 4 else 1.0
        if order["names"] == [exchange.DISTRIBUTED]:
            raise MeasurementError("torch.distributed: no port")
        times = {name: slower * (0.001 if name == "compiled" else 0.002) for name in order["names"]}
        return [{"case": case, "times": times} for case in order["cases"]]

    monkeypatch.setattr(exchange, "_run", fake)
    rows, problems = measure_exchange(["textbook", "compiled", "my.own"], CASES, [2], 0.1, 2)
    assert [order["names"] for order in orders[:4]] == [
        ["textbook", "copy", "read-modify-write"],
        ["compiled"],
        ["my.own"],
        [exchange.DISTRIBUTED],
    ]
    assert list(orders[3]["cases"]) == ["4 kB", "Sequential, flat"] and problems == ["torch.distributed: no port"]
    lines = exchange_tables(rows)
    assert lines[1] == "**The allreduce alone: 4 kB**" and lines.count("| compiled | 2.000 | 2.00 | 2.00 |") == 3


@pytest.mark.slow
def test_gloo_and_a_compiled_function_in_real_processes(tmp_path: Path) -> None:
    rows, problems = measure_exchange(["textbook", "compiled"], {"4 kB": [[1024]]}, [2], 0.01, 1)
    names = {row["algorithm"] for row in rows}
    assert names == {"textbook", "compiled", "copy", "read-modify-write", "gloo"} and problems == []
    assert all(0 < row["repeats"][0] < 10 for row in rows)
    plot_exchange(rows, tmp_path / "exchange.png")
    assert (tmp_path / "exchange.png").read_bytes().startswith(b"\x89PNG")
