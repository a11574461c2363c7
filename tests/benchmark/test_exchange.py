"""The arithmetic of `benchmark.exchange` on a fake clock, and gloo between two real processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.allreduce import textbook_allreduce, with_many
from lightning_mgpu.benchmark import exchange
from lightning_mgpu.benchmark.exchange_processes import measure_processes
from lightning_mgpu.benchmark.exchange_report import plot_exchange, table


class Clock:
    """Time passes only when something `takes` it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Callable[..., None]:
        def call(*args: object) -> None:
            self.now += seconds

        return call


def test_a_row_has_median_spread_and_bandwidths() -> None:
    row = exchange.result("ring", 4, 600, [3.0, 1.0, 2.0, 2.0, 9.0])
    assert row == {
        "algorithm": "ring",
        "k": 4,
        "bytes": 600,
        "seconds": 2.0,
        "min": 1.0,
        "max": 9.0,
        "runs": 5,
        "algorithm_bandwidth": 300.0,
        "bus_bandwidth": 450.0,  # 2 * 3/4 of it
    }


def test_takes_turns_until_the_time_is_over() -> None:
    clock, order = Clock(), []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            clock.now += seconds

        return run

    times = exchange.interleave({"a": call("a", 1.0), "b": call("b", 3.0)}, 10.0, clock=clock)
    assert times == {"a": [1.0] * 5, "b": [3.0] * 5}  # 10 s for each of two, 4 s a turn
    assert order == [*"aabb", *"ab", *"ba", *"ab", *"ba", *"ab"]  # warm-up, then another one first every time
    times = exchange.interleave({"a": call("a", 100.0)}, 1.0, clock=clock)
    assert times == {"a": [100.0] * 3}


def test_devices_are_synchronised_before_the_clock_is_read() -> None:
    clock = Clock()
    queued = [0.0]

    def launch() -> None:
        queued[0] += 5.0

    def synchronize() -> None:
        clock.now += queued[0]
        queued[0] = 0.0

    assert exchange.interleave({"a": launch}, 1.0, synchronize, clock) == {"a": [5.0] * 3}


def test_measures_every_algorithm_k_and_size_beside_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(exchange, "LIMITS", {name: clock.takes(1.0) for name in exchange.LIMITS})
    seen: list[tuple[int, int]] = []

    def fake(tensors: list[Tensor]) -> None:
        assert all(t.dtype == torch.float32 for t in tensors)
        seen.append((len(tensors), tensors[0].nbytes))
        clock.now += 2.0

    said: list[str] = []
    rows = exchange.measure_exchange({"fake": fake}, [4096, 8192], [2, 3], 1.0, progress=said.append, clock=clock)
    assert [(r["algorithm"], r["k"], r["bytes"]) for r in rows] == [
        (name, k, size) for k in (2, 3) for size in (4096, 8192) for name in ("fake", "copy", "read-modify-write")
    ]
    assert set(seen) == {(2, 4096), (2, 8192), (3, 4096), (3, 8192)}
    assert [r["algorithm_bandwidth"] for r in rows if r["algorithm"] == "fake"] == [2048.0, 4096.0] * 2
    assert said == ["k = 2, 4 kB", "k = 2, 8 kB", "k = 3, 4 kB", "k = 3, 8 kB"]


def test_skips_what_does_not_fit_and_says_so() -> None:
    rows = exchange.measure_exchange({"textbook": textbook_allreduce}, [4096, 2**20], [2], 0.0, free_bytes=2**20)
    assert all("seconds" in row for row in rows if row["bytes"] == 4096)
    skipped = [row for row in rows if row["bytes"] == 2**20]
    assert [row["algorithm"] for row in skipped] == ["textbook", "copy", "read-modify-write"]
    assert all(row["skipped"] == "needs 4 MiB, more than half of the 1 MiB that are free" for row in skipped)
    assert "not measured: needs 4 MiB" in table(rows)


def test_a_models_gradients_go_through_many() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    model[0].bias.requires_grad = False
    shapes = exchange.model_gradients(model)
    assert shapes == [(5, 3), (2, 5)]
    calls = []

    @with_many(lambda gradients: calls.append([[t.shape for t in same] for same in gradients]))
    def fake(tensors: list[Tensor]) -> None:
        raise AssertionError("has a many")

    rows = exchange.measure_gradients({"fake": fake}, shapes, [2], 0.0)
    names = ("fake", "fake, flat", "copy", "read-modify-write")
    assert [(r["algorithm"], r["bytes"]) for r in rows] == [(name, 100) for name in names]
    separate = [call for call in calls if call != [[(25,)] * 2]]
    assert all(call == [[(5, 3)] * 2, [(2, 5)] * 2] for call in separate)
    assert 0 < len(separate) < len(calls)


def test_limits_touch_all_bytes() -> None:
    gradients, spare = [[torch.zeros(3) for _ in range(2)] for _ in range(2)], [[torch.ones(3), torch.ones(3)]] * 2
    versions = [t._version for same in gradients for t in same]
    exchange.LIMITS["copy"](gradients, spare)
    assert all(t.eq(0).all() for same in spare for t in same)
    exchange.LIMITS["read-modify-write"](gradients, spare)
    assert all(t._version > v for t, v in zip([t for same in gradients for t in same], versions, strict=True))


def test_table_and_picture(tmp_path: Path) -> None:
    rows = [exchange.result(*row) for row in [("textbook", 2, 2**20, [3.0]), ("ring", 2, 2**20, [2.0])]]
    rows += [exchange.result("read-modify-write", 2, 2**20, [1.0]), exchange.result("ring", 4, 2**21, [2.0])]
    lines = table(rows).splitlines()
    assert lines[2].split() == ["1", "MB", "2", "ring", "2000.000", "2000.000", "1", "0.00", "0.00", "1.50", "0.50"]
    assert len(lines[4].split()) == 9  # nothing to compare with
    plot_exchange(rows, tmp_path / "picture.png")
    plot_exchange([], tmp_path / "empty.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "measure_exchange", lambda *args, **kwargs: pytest.fail("measured"))
    for option in ("--json", "--picture"):
        with pytest.raises(SystemExit):
            exchange.main([option, str(tmp_path / "missing" / "x")])
        assert f"there is no directory {tmp_path / 'missing'}" in capsys.readouterr().err


CHAIN = """
def chain(data):
    for before, tensor in zip(data, data[1:]):
        tensor.add_(before)
    for tensor in data[:-1]:
        tensor.copy_(data[-1])

def forgetful(data):
    data[0].add_(data[1])
"""


@pytest.mark.slow
def test_an_algorithm_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "my_exchange.py").write_text(CHAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    little = ["--quick", "--sizes", "1024", "--seconds", "0.001", "--models", "--json", "x.json", "--algorithms"]
    exchange.main([*little, "textbook", "my_exchange.chain"])
    names = [row["algorithm"] for row in json.loads(Path("x.json").read_text())["exchange"]]
    assert names[:2] == ["textbook", "my_exchange.chain"] and "ring" not in names
    for wrong in ("chian", "my_exchange.chian", "my_exchange.forgetful"):
        with pytest.raises(SystemExit):
            exchange.main([*little, wrong])
        assert f"--algorithms: {wrong}: " in (err := capsys.readouterr().err) and "choose from textbook, " in err


@pytest.mark.slow
def test_gloo_between_two_processes() -> None:
    rows = measure_processes([4096], [2], 0.01, timeout=60)
    assert [(row["algorithm"], row["k"], row["bytes"]) for row in rows] == [("gloo", 2, 4096)]
    assert rows[0]["runs"] >= 3 and rows[0]["min"] > 0


@pytest.mark.slow
def test_processes_that_take_too_long_are_ended() -> None:
    rows = measure_processes([4096], [2], 0.01, timeout=0.2)
    assert rows == [{"algorithm": "gloo", "k": 2, "bytes": 4096, "skipped": "not done after 0.2 s"}]
