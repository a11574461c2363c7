"""`check_allreduce` refuses each way to get it wrong in one line that names function and device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.allreduce import Allreduce, check_allreduce, textbook_allreduce

CPU = torch.device("cpu")


def book_2021(data: list[Tensor]) -> None:
    """d2l.ai from 2021-01 to 2021-12: the loop at the end gives the list other tensors."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)


def book_today(data: list[Tensor]) -> None:
    """d2l.ai since then: right but for 0-d tensors, which strategies reshape to one element."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def views(data: list[Tensor]) -> None:
    textbook_allreduce([t.view(-1) for t in data])


def drops_the_remainder(data: list[Tensor]) -> None:
    n = data[0].numel() // len(data) * len(data)
    textbook_allreduce(data if data[0].numel() < len(data) else [t.flatten()[:n] for t in data])


def sums_in_another_order_on_each(data: list[Tensor]) -> None:
    terms = [t.clone() for t in data]
    for i, t in enumerate(data):
        t.copy_(torch.stack(terms[i:] + terms[:i]).sum(0))


def sums_in_float32(data: list[Tensor]) -> None:
    total = torch.stack([t.float() for t in data]).sum(0)
    for t in data:
        t.copy_(total)


def shares_the_memory(data: list[Tensor]) -> None:
    textbook_allreduce(data)
    for t in data[1:]:
        t.data = data[0]


def changes_its_mind(data: list[Tensor], calls: list[int] = []) -> None:  # noqa: B006 - remembers
    calls.append(1)
    total = torch.stack(data if len(calls) % 2 else data[::-1]).sum(0)
    for t in data:
        t.copy_(total)


REFUSED: dict[Callable[[list[Tensor]], Any], list[str]] = {
    book_2021: [
        "left device 1 (cpu) with [2.0, 4.0] instead of the sum [7.0, 14.0]",
        "copy_(...)",
        "not rebind",
    ],
    views: ["raised RuntimeError", "strides (1, 3)", "view(-1) fails"],
    drops_the_remainder: ["left device 0 (cpu)", "shape (7,)"],
    sums_in_another_order_on_each: ["left device 1 (cpu)", "but device 0 with", "bit-identical"],
    sums_in_float32: ["left device 0 (cpu)", "torch.float64"],
    shares_the_memory: ["gave the tensor of device 1 (cpu) other memory"],
    changes_its_mind: ["when called again", "deterministic"],
}


@pytest.mark.parametrize("allreduce", REFUSED, ids=lambda f: f.__name__)
def test_refuses_in_one_line(allreduce: Allreduce) -> None:
    with pytest.raises(ValueError, match=rf"^allreduce {__name__}.{allreduce.__name__} ") as caught:
        check_allreduce(allreduce, [CPU] * 3)
    message = str(caught.value)
    assert "\n" not in message
    for part in REFUSED[allreduce]:
        assert part in message


def test_accepts_the_books_of_today_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    check_allreduce(book_today, [CPU] * 3)
    assert torch.equal(torch.get_rng_state(), before)
