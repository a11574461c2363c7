"""A trace has the messages, rounds and bytes that the cost table and the book have."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu import allreduce
from lightning_mgpu.allreduce import KeyValueStore, find_allreduce, textbook_allreduce
from lightning_mgpu.drawing import draw
from lightning_mgpu.drawing.trace import Trace, trace
from tests.conftest import REPOSITORY

ROWS = re.findall(r"^\| `(\w+)` +\| ([^|]+)\| ([^|]+)\| ([^|]+)\|", allreduce.__doc__, re.MULTILINE)
assert len(ROWS) == 5
NUMEL = 2520  # is divisible by 2 .. 9


def evaluate(formula: str, k: int) -> float:
    """A cell of the cost table for k devices, in tensors of n bytes."""
    formula = formula.strip().partition(",")[0].replace("ceil(log2 k)", "L")
    product = re.sub(r"(?<=[\dkL)]) ?(?=[(kLn])", "*", formula)  # 2(k-1) n -> 2*(k-1)*n
    return float(eval(product, {"k": k, "n": 1, "L": ceil(log2(k))}))


def counts(result: Trace) -> tuple[float, ...]:
    """Messages and rounds, and in tensors what the busiest device sends and receives."""
    busiest = max(result.sent) / result.nbytes, max(result.received) / result.nbytes
    return len(result.messages), result.num_rounds, *busiest


def chain(tensors: list[Tensor]) -> None:
    for before, after in pairwise(tensors):
        after.add_(before.to(after.device))
    for after, before in zip(tensors[::-1], tensors[-2::-1]):
        before.copy_(after)


def in_half_precision(tensors: list[Tensor]) -> None:
    total = torch.zeros(tensors[0].shape, device=tensors[0].device)
    for tensor in tensors:
        total += tensor.half().to(total.device) * torch.tensor(1.0)
    for tensor in tensors:
        tensor.copy_(total.half().to(tensor.device))


def by_the_host(tensors: list[Tensor]) -> None:
    store = KeyValueStore(torch.device("cpu"))
    for worker, tensor in enumerate(tensors):
        store.push("gradient", worker, tensor)
    for tensor in tensors:
        store.pull("gradient", tensor)


def pass_on_in_slices(tensors: list[Tensor]) -> None:
    for slices in zip(*(tensor.tensor_split(10) for tensor in tensors)):
        for before, after in pairwise(slices):
            after.copy_(before)


def views_outputs_and_lists(tensors: list[Tensor]) -> None:
    first, second, third = tensors
    for half in range(2):
        second.view(2, -1)[half].copy_(first.view(2, -1)[half])
    torch.add(first, second, out=third)
    sums = torch._foreach_add([first, first], [third, third])
    torch._foreach_copy_([second, third], sums)


@pytest.mark.parametrize("k", range(2, 10))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_cost_table(row: tuple[str, ...], k: int) -> None:
    name, messages, rounds, busiest = row
    expected = [evaluate(cell, k) for cell in (messages, rounds, busiest, busiest)]
    assert counts(trace(find_allreduce(name), k, NUMEL)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "k", "expected"),
    [
        (chain, 4, (6, 6, 2, 2)),
        (in_half_precision, 4, (6, 6, 1.5, 1.5)),
        (by_the_host, 4, (8, 8, 4, 4)),
        (pass_on_in_slices, 4, (30, 10 + 2, 1, 1)),  # while a slice goes on, the next comes
        (views_outputs_and_lists, 3, (8, 7, 4, 3)),
    ],
)
def test_fresh_functions(function: Callable, k: int, expected: tuple[float, ...]) -> None:
    assert counts(trace(function, k, NUMEL)) == pytest.approx(expected)


def test_no_device_does_two_things_at_once_and_data_is_there_before_it_is_sent() -> None:
    for function in (chain, allreduce.tree_allreduce, by_the_host, pass_on_in_slices):
        messages = trace(function, 6, NUMEL).messages
        for end in ("source", "target"):
            assert len({(m.round, getattr(m, end)) for m in messages}) == len(messages)
    ways = [(m.source, m.target, m.round) for m in trace(chain, 3, NUMEL).messages]
    assert ways == [(0, 1, 1), (1, 2, 2), (2, 1, 3), (1, 0, 4)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [("textbook", 60), ("sharded", 15), ("ring", 15), ("tree", 40), (by_the_host, 80)],
)
def test_times_of_the_book(function: Any, expected: float) -> None:
    """160 MB between 4 GPUs on PCIe 3 x16, 10 ms each: 'Parameter Servers'."""
    function = find_allreduce(function) if isinstance(function, str) else function
    result = trace(function, 4, 40_000_000)
    assert result.milliseconds(0, 16e9) == pytest.approx(expected)
    assert result.milliseconds(1e-3, 16e9) == pytest.approx(expected + result.num_rounds)


def asks(tensors: list[Tensor]) -> None:
    if tensors[0].norm() > 0:
        textbook_allreduce(tensors)


def test_what_needs_numbers_is_refused_with_its_line() -> None:
    number = asks.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"^cannot trace test_drawing.py:{number}, `.*$"):
        trace(asks, 3, NUMEL)


def is_silent(X: Tensor, state: Any) -> Iterator[Any]:
    """The second replica sends nothing."""
    return sum((yield X)) if state.replica != 1 else X


def exchange(X: Tensor, state: Any, rank: int = 2) -> Iterator[Any]:
    """Sends `rank` rows, then as many columns and their number."""
    assert (state.name, state.num_replicas, state.seed) == ("weight", 3, 0)
    rows = yield X[:rank]
    assert torch.equal(rows[state.replica], X[:rank])
    yield X[:, :rank], torch.tensor(rank)
    return torch.cat([sum(rows), torch.zeros_like(X[rank:])])


def is_late(X: Tensor, state: Any) -> Iterator[Any]:
    """It returns the sum of the step before."""
    before, state["sum"] = state.get("sum", torch.zeros_like(X)), sum((yield X))
    return before


def test_an_exchange_goes_from_each_to_all() -> None:
    result = trace(exchange, 3, 100)
    assert result.nbytes == 400 and result.num_rounds == 4
    assert sorted(m.nbytes for m in result.messages) == [80] * 6 + [88] * 6
    assert result.sent[:3] == result.received[:3] == [2 * 80 + 2 * 88] * 3
    assert result.errors == pytest.approx([result.errors[0]] * 64) and result.errors[0] > 0.5
    assert trace(is_late, 2, 100).errors == pytest.approx([1 / n for n in range(1, 65)])


def test_picture() -> None:
    half, host = draw({"a": trace(chain, 4, NUMEL), "b": trace(by_the_host, 3, NUMEL)}).axes
    assert len(half.texts) == 6 and len(host.texts) == 6
    assert [label.get_text() for label in host.get_yticklabels()][-2:] == ["device 2", "host"]
    figure = draw({name: trace(find_allreduce(name), 2, NUMEL) for name in ("textbook", "sharded")})
    whole, slices = ({text.arrow_patch.get_linewidth() for text in a.texts} for a in figure.axes)
    assert whole == {3} and slices == {1.5}  # as wide as its bytes, in all panels alike


def command_of(page: str, name: str) -> list[str]:
    """Write the file `name` of a page; returns the command that traces its function."""
    text = (REPOSITORY / page).read_text()
    [code] = re.findall(rf"```python\n# {name}.py\n(.*?)```", text, re.DOTALL)
    Path(f"{name}.py").write_text(code)
    [line] = re.findall(rf"python -m lightning_mgpu (allreduce {name}[^`#\n]*)", text)
    return line.split()


def test_command_for_exchanges(main, tmp_path, capsys):
    pytest.importorskip("lightning_mgpu.exchanges")  # they can be deleted
    (tmp_path / "mine.py").write_text(Path(__file__).read_text())
    assert main(*command_of("docs/exchanges.md", "my_half")) == 0
    said = capsys.readouterr().out
    assert "an exchange, on at most 256 x 256 numbers" in said
    assert "sends at most 1.5 n" in said  # of numbers of half the size
    assert "it sends 50.000% of its tensor to each other device" in said
    assert main("allreduce", "exact", "ring", "power_sgd", "mine.is_late") == 0
    said = capsys.readouterr().out
    assert "power_sgd: 24 messages in 6 rounds" in said
    assert "off the exact sum by 0.00%, and over 64 steps by 0.00%" in said  # exact
    assert "off the exact sum by 100.00%, and over 64 steps by 1.56%" in said
    assert main("allreduce", "mine.is_silent") == 2
    assert "is_silent with torch.float32: RuntimeError: (), waiting" in capsys.readouterr().err


def test_command(main: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.py").write_text(Path(__file__).read_text())
    assert main("allreduce", "sharded", "mine.chain") == 0
    said = capsys.readouterr().out
    assert "sharded: 24 messages in 6 rounds, 15.03 ms" in said and "1.5 n" in said
    assert main(*command_of("README.md", "my_allreduce")) == 0 and Path("allreduce.png").exists()
    assert "chain_allreduce: 6 messages in 6 rounds, 60.03 ms" in capsys.readouterr().out
    assert main("allreduce", "tree", "--sweep", "--link=10gbe", "--picture=times.png") == 0
    assert Path("times.png").exists()
    for args, error in (
        (["mine.asks"], "cannot trace mine.py:"),
        (["mine.in_half_precision"], "mine.in_half_precision of 2 tensors left device 0"),
        (["mine.nothing"], "no allreduce 'mine.nothing'"),
        (["mine.exchange", "--sweep"], "--sweep: not for an exchange"),
        (["ring", "--mb=x"], "argument --mb: invalid float value: 'x'; see python -m"),
        (["ring", "--mb=nan"], "--mb=nan: a number from 1e-06 to 1,000,000"),
    ):
        assert main("allreduce", *args) == 2
        assert error in capsys.readouterr().err
