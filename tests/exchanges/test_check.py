"""Exchanges of this package and of users, on small tensors."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mgpu.exchanges import check_exchange, exact, power_sgd, sign, top_k
from lightning_mgpu.exchanges.runner import State, run_exchanges
from tests.conftest import run_devices


def run_once(exchange: Any, tensors: list[Tensor], states: list[Any]) -> Tensor:
    generators = [{"w": exchange(X.clone(), state)} for X, state in zip(tensors, states)]
    results, _ = run_exchanges(generators, {"w": tensors[0]}, Tensor.detach, np.copy)
    return results["w"]


def new_states(k: int) -> list[State]:
    return [State("w", replica, k) for replica in range(k)]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("exchange", [exact, top_k, power_sgd, sign])
def test_each_passes_its_check(exchange: Any, k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        has_state = check_exchange(exchange, k, run_devices(1)[0], dtype)
        assert has_state == (exchange is not exact)


def test_exact_is_the_sum_in_the_order_of_the_replicas() -> None:
    tensors = [torch.randn(5, 3) * 10**i for i in range(4)]
    expected = tensors[0] + tensors[1] + tensors[2] + tensors[3]
    assert torch.equal(run_once(exact, tensors, new_states(4)), expected)


@pytest.mark.parametrize("exchange", [top_k, power_sgd, sign])
def test_nothing_is_lost(exchange: Any) -> None:
    """The sums so far and all that waits add up to the sum of all gradients."""
    torch.manual_seed(0)
    states, sent, total = new_states(3), torch.zeros(20, 30).double(), torch.zeros(20, 30).double()
    for _ in range(5):
        tensors = [torch.randn(20, 30).double() for _ in states]
        sent += run_once(exchange, tensors, states)
        total += sum(tensors)
    waiting = sum(state["rest"].view(20, 30) for state in states)
    torch.testing.assert_close(sent + waiting, total, rtol=1e-10, atol=1e-10)
    assert waiting.norm() > 0.1 * total.norm()


def test_power_sgd_finds_a_sum_of_low_rank() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(20, 1) @ torch.ones(1, 30) for _ in range(2)]
    found = run_once(partial(power_sgd, rank=1), tensors, new_states(2))
    torch.testing.assert_close(found, sum(tensors))


@pytest.mark.parametrize(("exchange", "num_bytes"), [(exact, 240), (top_k, 36), (sign, 12)])
def test_bytes_are_those_of_what_is_sent(exchange: Any, num_bytes: int) -> None:
    """60 float32 numbers; three of them with int64 indices; 60 bits and a float32."""
    generators = [{"w": exchange(torch.randn(60), state)} for state in new_states(2)]
    _, found = run_exchanges(generators, {"w": torch.zeros(60)}, Tensor.detach, np.copy)
    assert found == num_bytes


def wrong_shape(X: Tensor, state: Any) -> Any:
    return sum((yield X)).flatten()


def own_times(X: Tensor, state: Any) -> Any:
    for _ in range(1 + state.replica):
        total = sum((yield X))
    return total


def own_result(X: Tensor, state: Any) -> Any:
    yield X
    return X


def in_place(X: Tensor, state: Any) -> Any:
    tensors = yield X
    for other in tensors[1:]:
        tensors[0].add_(other)
    return tensors[0]


def random_entries(X: Tensor, state: Any) -> Any:
    return sum((yield X * (torch.rand(X.shape) < 0.5)))


def object_in_state(X: Tensor, state: Any) -> Any:
    state["generator"] = torch.Generator()
    return sum((yield X))


def no_tensor(X: Tensor, state: Any) -> Any:
    yield X


WRONG: dict[Callable, str] = {
    wrong_shape: r"\(\): \(\(1,\), torch.float32, 'cpu'\) is returned; needed is",
    own_times: "replica 1 does not send what replica 0 sends",
    own_result: "what is returned differs between replicas",
    in_place: "line 8[0-9]: what is received belongs to all: clone it first",
    random_entries: "equal inputs and states give other bits in a second call",
    object_in_state: "torch._C.Generator|cannot pickle|Unsupported",
    no_tensor: r"\(\): None is returned",
    partial(top_k, fractoin=0.1): "unexpected keyword argument 'fractoin'",
}


@pytest.mark.parametrize("exchange", WRONG)
def test_what_is_wrong_is_one_line(exchange: Any) -> None:
    with pytest.raises(ValueError, match=WRONG[exchange]) as caught:
        check_exchange(exchange, 2)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("exchange ")


def eight_bits(X: Tensor, state: Any) -> Any:
    """One scale per tensor."""
    whole = X + state.get("rest", 0)
    scale = whole.abs().max().clamp(min=1e-30) / 127
    levels = (whole / scale).round().to(torch.int8)
    state["rest"] = whole - levels * scale
    return sum(theirs * s for theirs, s in (yield levels, scale))


def seeded_entries(X: Tensor, state: Any, fraction: float = 0.25) -> Any:
    """The same random entries in all replicas, so that no indices travel."""
    state["step"] = state.get("step", 0) + 1
    generator = torch.Generator().manual_seed(crc32(state.name.encode()) + state["step"])
    whole = X.flatten() + state.get("rest", 0)
    count = max(1, round(fraction * len(whole)))
    indices = torch.randperm(len(whole), generator=generator)[:count].to(X.device)
    state["rest"] = whole.index_fill(0, indices, 0)
    total = sum((yield whole[indices]))
    return torch.zeros_like(whole).index_copy_(0, indices, total).view_as(X)


def two_levels(X: Tensor, state: Any, size: int = 2) -> Any:
    """Sums of groups of replicas, of which the first ones send them in half precision."""
    tensors = yield X
    first = state.replica // size * size
    group = sum(tensors[first : first + size])
    sums = yield group.half()
    return sum(each.to(X.dtype) for each in sums[::size])


PAGE = (Path(__file__).parents[2] / "docs" / "exchanges.md").read_text()
NAMES, BLOCKS = zip(*re.findall(r"```python\n# (\S+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))


def test_those_of_the_page_and_those_written_from_it() -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(block, namespace)
    functions = [namespace[name] for name in NAMES]
    assert len(functions) == 3
    for each in (*functions, eight_bits, seeded_entries, two_levels):
        for k in (1, 4):
            has_state = check_exchange(each, k)
            assert has_state == (each in (namespace["my_top_k"], eight_bits, seeded_entries))
    torch.manual_seed(0)
    tensors = [torch.randn(9, 30) for _ in range(4)]
    for each in (namespace["my_half"], eight_bits, two_levels):
        found = run_once(each, tensors, new_states(4))
        torch.testing.assert_close(found, sum(tensors), rtol=0, atol=0.06)
    a, b = (run_once(each, tensors, new_states(4)) for each in (top_k, namespace["my_top_k"]))
    assert torch.equal(a, b)
