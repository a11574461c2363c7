"""Exchanges of this package and of users, on small tensors."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.exchanges import check_exchange, ef_sign, exact, power_sgd, top_k
from lightning_mgpu.exchanges.route import RoundLayout, State, run_exchanges, run_here


def run_once(exchange, tensors, datas=None):
    k = len(tensors)
    datas = [{} for _ in range(k)] if datas is None else datas
    states = [{"w": State("w", replica, k, data)} for replica, data in enumerate(datas)]
    route = run_exchanges(exchange, [{"w": X.clone()} for X in tensors], states, 1, RoundLayout())
    return run_here(route)[0][0]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("exchange", [exact, top_k, power_sgd, ef_sign])
def test_each_passes_its_check(exchange, k):
    for dtype in (torch.float32, torch.float64):
        has_state = check_exchange(exchange, "", torch.device("cpu"), dtype)
        assert has_state == (exchange is not exact)


@pytest.mark.parametrize("exchange", [top_k, power_sgd, ef_sign])
def test_nothing_is_lost(exchange):
    """The sums so far and all that waits add up to the sum of all gradients."""
    torch.manual_seed(0)
    states = [{}, {}, {}]
    sent, total = torch.zeros(20, 30).double(), torch.zeros(20, 30).double()
    for _ in range(5):
        tensors = [torch.randn(20, 30).double() for _ in states]
        sent += run_once(exchange, tensors, states)
        total += sum(tensors)
    waiting = sum(data["residual"].view(20, 30) for data in states)
    torch.testing.assert_close(sent + waiting, total, rtol=1e-10, atol=1e-10)
    assert waiting.norm() > 0.1 * total.norm()


def test_power_sgd_finds_a_sum_of_low_rank():
    torch.manual_seed(0)
    tensors = [torch.randn(20, 1) @ torch.ones(1, 30) for _ in range(2)]
    found = run_once(partial(power_sgd, rank=1), tensors)
    torch.testing.assert_close(found, sum(tensors))


WRONG = {
    "return sum((yield X)).flatten()": r"returned shape \(1,\) .*, but X is shape \(\)",
    "return X": "an exchange must be a generator",
    "yield X": r"returned None",
    "for _ in range(1 + state.replica): total = sum((yield X))\n return total": (
        r"\(\), waiting in line \[2\]: replica 1 sends shape .*, but replica 0 sends \[\]"
    ),
    "yield X\n return X": "results differ between replicas",
    "return (yield X)[0].add_(1)": "Inplace update to inference tensor",
    "return sum((yield X * (torch.rand(X.shape) < 0.5)))": "and states give different results",
    "state['object'] = torch.Generator()\n return sum((yield X))": (
        "torch._C.Generator|cannot pickle|Unsupported"
    ),
    "state['object'] = torch.nn.ReLU()\n return sum((yield X))": (
        "a state contains .*ReLU.*: use tensors, numbers, strings"
    ),
    "return sum((yield X / X.norm()))": "a gradient of zeros gives non-finite results",
    "return sum((yield X, state.fractoin)[0])": "no attribute 'fractoin'",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_one_line(body):
    exec(f"def wrong(X, state):\n {body}", namespace := {"torch": torch, "__name__": "mine"})
    with pytest.raises(ValueError, match=WRONG[body]) as caught:
        check_exchange(namespace["wrong"])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("exchange mine.wrong ")


PAGE = (Path(__file__).parents[2] / "docs" / "exchanges.md").read_text()
NAMES, BLOCKS = zip(*re.findall(r"```python\n# (\S+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))


NAMESPACE = {"__name__": "page"}
for block in BLOCKS:
    exec(block, NAMESPACE)


def test_those_of_the_page():
    mean, state = torch.ones(2), dict[str, Any]()
    steps = [NAMESPACE["heavy_ball"](mean, state) for _ in range(2)]
    torch.testing.assert_close(steps, [0.7 * mean, 0.7 * 1.9 * mean])
    names = [name for name in NAMES if name.startswith("my_") and name != "my_outer"]
    assert names == ["my_half", "my_qsgd", "my_vote", "my_demo"]
    tensors = [*torch.randn(4, 9, 30, generator=torch.Generator().manual_seed(0))]
    found = run_once(NAMESPACE["my_half"], tensors)
    torch.testing.assert_close(found, sum(tensors), rtol=0, atol=0.01)
    for name, has_state in zip(names, (False, True, False, True)):
        assert check_exchange(NAMESPACE[name]) == has_state


def test_the_annotated_top_k_is_the_file():
    [code] = re.findall(r"```python\n# from \S+/top_k.py\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, namespace := {"torch": torch})
    datas: list[Any] = [[{}, {}], [{}, {}]]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tensors = [*torch.randn(2, 9, 30, generator=generator)]
        pairs = zip((top_k, namespace["top_k"]), datas)
        first, second = (run_once(function, tensors, data) for function, data in pairs)
        assert torch.equal(first, second)


def test_qsgd_is_unbiased_with_independent_noise():
    """Means over steps, in units of what independent noise of two replicas with one X gives."""
    X = torch.randn(300, generator=torch.Generator().manual_seed(0)).double()
    exchange, datas = partial(NAMESPACE["my_qsgd"], levels=5), [{}, {}]
    mean = sum(run_once(exchange, [X, X], datas) for _ in range(400)) / 400
    level = X.norm() / 5
    chance = (X.abs() / level).frac()  # of the upper level
    errors = (mean - 2 * X) / (level * (2 * chance * (1 - chance) / 400).sqrt())
    assert errors.abs().max() < 4 and 0.8 < errors.square().mean() < 1.2
