"""`check_allreduce` raises an error for each mistake, which names the function and the device."""

import pytest
import torch

from lightning_mgpu.allreduce import check_allreduce, ring_allreduce, textbook_allreduce

CPU = torch.device("cpu")


def book_2021(data):
    """d2l.ai from 2021-01 to 2021-12 gives the list other tensors."""
    data[0][:] = torch.stack(data).sum(0)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)


def views(data):
    textbook_allreduce([t.view(-1) for t in data])


def drops_the_remainder(data):
    n = data[0].numel() // len(data) * len(data)
    textbook_allreduce(data if data[0].numel() < len(data) else [t.flatten()[:n] for t in data])


def drops_the_tail(data):
    """In pieces of 1,024 numbers, as for a network, of which the last one is missing."""
    n = data[0].numel()
    for begin in range(0, max(n - 1023, 1), 1024):
        textbook_allreduce([t.reshape(-1)[begin : begin + 1024] for t in data])


def sums_in_another_order_on_each(data):
    terms = [t.clone() for t in data]
    for i in range(len(data)):
        data[i].copy_(torch.stack(terms[i:] + terms[:i]).sum(0))


def changes_its_mind(data, calls=[]):  # noqa: B006 - remembers
    calls.append(1)
    total = torch.stack(data if len(calls) % 2 else data[::-1]).sum(0)
    for t in data:
        t.copy_(total)


def claims_slices(data):
    """A ring adds each element in an order that depends on its place."""
    ring_allreduce(data)


claims_slices.elementwise = True


def asks(data):
    if data[0].isfinite().all():
        textbook_allreduce(data)


ERRORS = {
    book_2021: ["left device 1 (cpu) with [2.0, 4.0] instead of the sum [7.0, 14.0]", "not rebind"],
    views: ["raised RuntimeError", "shape (3, 5), strides (1, 3)"],
    drops_the_remainder: ["left device 0 (cpu)", "shape (7,)"],
    drops_the_tail: ["left device 0 (cpu)", "shape (5003,)"],
    sums_in_another_order_on_each: ["left device 1 (cpu)", "on device 0", "bitwise identical"],
    changes_its_mind: ["when called again", "in every call"],
    claims_slices: ["on slices (`elementwise`)"],
}


@pytest.mark.parametrize("function", ERRORS, ids=lambda f: f.__name__)
def test_refuses_in_one_line(function):
    with pytest.raises(ValueError, match=rf"^allreduce {__name__}.{function.__name__} ") as caught:
        check_allreduce(function, [CPU] * 3)
    assert all(part in str(caught.value) for part in ERRORS[function])
    assert "\n" not in str(caught.value)


def test_compares_the_plan_bitwise():
    """`.to` of a tensor that is on the device returns the tensor; between devices, a copy."""

    def writes_to_the_result_of_to(tensors):
        total = tensors[0]
        for other in tensors[1:]:
            total.add_(other.to(total.device))
            other.to(total.device).zero_()
        for other in tensors[1:]:
            other.add_(total)

    check_allreduce(writes_to_the_result_of_to, [CPU] * 3)
    with pytest.raises(ValueError, match=r"but \[9.*, 18.*\] as written .* `.to") as caught:
        check_allreduce(writes_to_the_result_of_to, [CPU] * 3, as_written=True)
    assert "as_written=false" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^test_check.py:\d+ cannot run as written"):
        check_allreduce(asks, [CPU] * 3, as_written=True)


def test_takes_many_devices_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check_allreduce(textbook_allreduce, [CPU] * 1024)
    assert torch.equal(torch.get_rng_state(), before)
