"""Messages by superstep, bytes per device, and the predicted times of the book."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lightning_mgpu.allreduce import find_allreduce, textbook_allreduce
from lightning_mgpu.lab.tracing import draw, predict, trace
from lightning_mgpu.lab.tracing.trace import trace_exchange
from tests.conftest import REPOSITORY

NUMEL = 2520


def chain(tensors):
    for before, after in pairwise(tensors):
        after.add_(before.to(after.device))
    for after, before in zip(tensors[::-1], tensors[-2::-1]):
        before.copy_(after)


def asks(tensors):
    if tensors[0].norm() > 0:
        textbook_allreduce(tensors)


@pytest.mark.parametrize(
    ("name", "expected", "supersteps"),
    [
        ("textbook", 60, 2),
        ("sharded", 15, 2),
        ("ring", 15, 6),
        ("halving_doubling", 15, 4),
        # device 0 sends two copies in one superstep
        ("tree", 50, 4),
    ],
)
def test_times_of_the_book(name, expected, supersteps):
    """160 MB between 4 GPUs on PCIe 3 x16, 10 ms each: 'Parameter Servers'."""
    plan = trace(find_allreduce(name), 4, 40_000_000)
    assert 1000 * predict(plan, 0, 16e9) == pytest.approx(expected)
    assert 1000 * predict(plan, 1e-3, 16e9) == pytest.approx(expected + supersteps)


def is_silent(X, state):
    """The second replica sends nothing."""
    return sum((yield X)) if state.replica != 1 else X


def exchange(X, state, rank=2):
    """Sends `rank` rows, then as many columns and their number."""
    assert (state.name, state.num_replicas, state.seed) == ("weight", 3, 0)
    rows = yield X[:rank]
    assert torch.equal(rows[state.replica], X[:rank])
    yield X[:, :rank], torch.tensor(rank)
    return torch.cat([sum(rows), torch.zeros_like(X[rank:])])


def is_late(X, state):
    """It returns the sum of the step before."""
    before, state["sum"] = state.get("sum", torch.zeros_like(X)), sum((yield X))
    return before


def test_an_exchange_goes_from_each_to_all():
    plan, errors = trace_exchange(exchange, 3, 100)
    assert plan.like.nbytes == 400 and plan.num_supersteps == 2
    assert [(m.superstep, m.like.nbytes) for m in plan.messages] == [(0, 80)] * 6 + [(1, 88)] * 6
    assert plan.sent == plan.received == [2 * 80 + 2 * 88] * 3
    assert predict(plan, 1, 16) == 2 + 160 / 16 + 176 / 16
    assert errors == pytest.approx([errors[0]] * 64) and errors[0] > 0.5
    assert trace_exchange(is_late, 2, 100)[1] == pytest.approx([1 / n for n in range(1, 65)])


def test_picture():
    names = ("textbook", "sharded")
    figure = draw({name: trace(find_allreduce(name), 2, NUMEL) for name in names})
    whole, slices = ({text.arrow_patch.get_linewidth() for text in a.texts} for a in figure.axes)
    assert whole == {3} and slices == {1.5}  # as wide as its bytes, in all panels alike
    [axes] = draw({"chain": trace(chain, 3, NUMEL)}).axes
    assert axes.get_title(loc="left") == "chain: 4 messages, 4 supersteps"
    ends = [(round(text.xyann[0], 2), text.xyann[1], text.xy[1]) for text in axes.texts]
    assert ends == [(0.65, 0, 1), (1.65, 1, 2), (2.65, 2, 1), (3.65, 1, 0)]


def test_command(main, tmp_path, capsys):
    pytest.importorskip("lightning_mgpu.exchanges")  # they can be deleted
    (tmp_path / "mine.py").write_text(Path(__file__).read_text())
    assert main("trace", "tree", "halving_doubling", "--delay_ms=2", "--mbit=50") == 0
    said = capsys.readouterr().out
    assert "halving_doubling: correct for k = 4\n" in said
    assert "predicted for 2 ms and 50 Mbit/s:" in said
    # four supersteps, and 1 + 1 + 2 + 1 times 0.516 MB
    assert f"tree: 6 messages in 4 supersteps, {4 * 2 + 5 * 0.516 * 8 / 50 * 1000:.4g} ms" in said
    assert "MB sent per device: 1.032, 0.516, 1.032, 0.516\n" in said
    assert "MB received per device: 1.032, 0.516, 1.032, 0.516\n" in said
    assert "at most 2 n, with n = 0.516 MB; the lower bound is 1.5 n" in said
    for page, file, hint in (
        ("README.md", "my_allreduce", "chain_allreduce: 6 messages in 6 supersteps, 367.7 ms"),
        ("docs/exchanges.md", "my_half", "an exchange, traced on at most 256 x 256 values"),
    ):
        text = (REPOSITORY / page).read_text()
        [code] = re.findall(rf"```python\n# {file}.py\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"{file}.py").write_text(code)
        [line] = re.findall(rf"python -m lightning_mgpu (trace {file}[^`#\n]*)", text)
        assert main(*line.split()) == 0 and Path("trace.png").exists()
        said = capsys.readouterr().out
        assert hint in said
    assert "at most 1.5 n" in said  # of numbers of half the size
    assert "50.000% of the tensor to each other device" in said
    assert main("trace", "exact", "ring", "power_sgd", "mine.is_late") == 0
    said = capsys.readouterr().out
    assert "power_sgd: 24 messages in 2 supersteps" in said
    assert "error of the sum: 0.00% in a step, 0.00% over 64 steps" in said  # exact
    assert "error of the sum: 100.00% in a step, 1.56% over 64 steps" in said
    assert main("trace", "sharded", "--devices=1") == 0
    assert main("trace", "halving_doubling", "--sweep", "--picture=times.png") == 0
    assert Path("times.png").exists()
    for args, error in (
        (["mine.asks"], f"mine.py:{asks.__code__.co_firstlineno + 1} cannot run as written: "),
        (["mine.is_silent"], "is_silent with torch.float32: RuntimeError: (), waiting"),
        (["mine.nothing"], "no allreduce 'mine.nothing'"),
        (["mine.exchange", "--sweep"], "--sweep: not supported for exchanges"),
        (["ring", "--mb=x"], "argument --mb: invalid float value: 'x'; see python -m"),
        (["ring", "--mb=nan"], "--mb=nan: must be a number from 1e-06 to 1,000,000"),
    ):
        assert main("trace", *args) == 2
        assert error in capsys.readouterr().err


def test_exchange_of_the_readme(main, tmp_path, capsys):
    pytest.importorskip("lightning_mgpu.exchanges")  # they can be deleted
    text = (REPOSITORY / "README.md").read_text()
    [code] = re.findall(r"```python\n# my_half.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "readme_half.py").write_text(code)
    assert main("trace", "readme_half.my_half") == 0
    assert "50.000% of the tensor to each other device" in capsys.readouterr().out
