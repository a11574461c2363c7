"""Exchanges of this package and of users, on small tensors."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.exchanges import check_exchange, exact, power_sgd, sign, top_k
from lightning_mgpu.exchanges.route import Plan, State, run_exchanges, run_here
from tests.conftest import run_devices


def run_once(exchange: Any, tensors: list[Tensor], datas: Any = None) -> Tensor:
    k = len(tensors)
    datas = [{} for _ in range(k)] if datas is None else datas
    states = [{"w": State("w", replica, k, data)} for replica, data in enumerate(datas)]
    route = run_exchanges(exchange, [{"w": X.clone()} for X in tensors], states, 1, Plan())
    return run_here(route)[0][0]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("exchange", [exact, top_k, power_sgd, sign])
def test_each_passes_its_check(exchange: Any, k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        has_state = check_exchange(exchange, None, run_devices(1)[0], dtype)
        assert has_state == (exchange is not exact)


@pytest.mark.parametrize("exchange", [top_k, power_sgd, sign])
def test_nothing_is_lost(exchange: Any) -> None:
    """The sums so far and all that waits add up to the sum of all gradients."""
    torch.manual_seed(0)
    states: list[dict[str, Tensor]] = [{}, {}, {}]
    sent, total = torch.zeros(20, 30).double(), torch.zeros(20, 30).double()
    for _ in range(5):
        tensors = [torch.randn(20, 30).double() for _ in states]
        sent += run_once(exchange, tensors, states)
        total += sum(tensors)
    waiting: Any = sum(data["rest"].view(20, 30) for data in states)
    torch.testing.assert_close(sent + waiting, total, rtol=1e-10, atol=1e-10)
    assert waiting.norm() > 0.1 * total.norm()


def test_power_sgd_finds_a_sum_of_low_rank() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(20, 1) @ torch.ones(1, 30) for _ in range(2)]
    found = run_once(partial(power_sgd, rank=1), tensors)
    torch.testing.assert_close(found, sum(tensors))


WRONG = {
    "return sum((yield X)).flatten()": r"for X of shape \(\) .* it returned shape \(1,\)",
    "return X": "an exchange is a generator",
    "yield X": r"it returned None",
    "for _ in range(1 + state.replica): total = sum((yield X))\n return total": (
        r"\(\), waiting in line \[2\]: replica 1 does not send what replica 0 sends"
    ),
    "yield X\n return X": "what is returned differs between replicas",
    "return (yield X)[0].add_(1)": "Inplace update to inference tensor",
    "return sum((yield X * (torch.rand(X.shape) < 0.5)))": "other bits in a second call",
    "state['object'] = torch.Generator()\n return sum((yield X))": (
        "torch._C.Generator|cannot pickle|Unsupported"
    ),
    "return sum((yield X / X.norm()))": "gradients of zeros give a result that is not finite",
    "return sum((yield X, state.fractoin)[0])": "no attribute 'fractoin'",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_one_line(body: str) -> None:
    exec(f"def wrong(X, state):\n {body}", namespace := {"torch": torch, "__name__": "mine"})
    with pytest.raises(ValueError, match=WRONG[body]) as caught:
        check_exchange(namespace["wrong"])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("exchange mine.wrong ")


PAGE = (Path(__file__).parents[2] / "docs" / "exchanges.md").read_text()
NAMES, BLOCKS = zip(*re.findall(r"```python\n# (\S+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))


def test_those_of_the_page() -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(block, namespace)
    assert len(NAMES) == 4 and "outer" in NAMES[3]
    mean, state = torch.ones(2), dict[str, Any]()
    steps = [namespace["heavy_ball"](mean, state) for _ in range(2)]
    torch.testing.assert_close(steps, [0.7 * mean, 0.7 * 1.9 * mean])
    torch.manual_seed(0)
    tensors = [torch.randn(9, 30) for _ in range(4)]
    for name, like in zip(NAMES, (exact, exact, top_k)):
        assert check_exchange(namespace[name]) == (like is top_k)
        found, expected = (run_once(each, tensors) for each in (namespace[name], like))
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01 if "half" in name else 0)
