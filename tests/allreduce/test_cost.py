"""Messages, bytes and rounds of every algorithm, counted from what torch executes, against the docstrings' formulas."""

from collections import Counter
from collections.abc import Callable
from math import ceil, log2
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mgpu.allreduce import (
    Allreduce,
    blocked_allreduce,
    ring_allreduce,
    sharded_allreduce,
    textbook_allreduce,
    tree_allreduce,
)

aten = torch.ops.aten


# For k devices and tensors of n bytes: messages, rounds, bytes that the device with most to do sends, and receives.


def textbook(k: int, n: int) -> tuple[int, int, float]:
    return 2 * (k - 1), 2 * (k - 1), (k - 1) * n


def tree(k: int, n: int) -> tuple[int, int, float]:
    return 2 * (k - 1), 2 * ceil(log2(k)), ceil(log2(k)) * n


def bandwidth_optimal(k: int, n: int) -> tuple[int, int, float]:
    return 2 * k * (k - 1), 2 * (k - 1), 2 * (k - 1) * n / k


FORMULAS: dict[Allreduce, Callable[[int, int], tuple[int, int, float]]] = {
    textbook_allreduce: textbook,
    blocked_allreduce: textbook,
    tree_allreduce: tree,
    sharded_allreduce: bandwidth_optimal,
    ring_allreduce: bandwidth_optimal,
}
each_algorithm = pytest.mark.parametrize("allreduce", FORMULAS, ids=lambda f: f.__name__)


class Message(NamedTuple):
    src: int
    dst: int
    num_bytes: int
    offset: int  # of the slice, which keeps its place on all devices


class Traffic(TorchDispatchMode):
    """Records the messages between `tensors`, one a device, while it is entered.

    It sees each operation below autograd. An `add_` or `copy_` from the memory of device i to that of device j is a
    message. Anything else that moves data fails, so the counts are complete.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.devices = range(len(tensors))
        self.device_of = {memory(t): i for i, t in enumerate(tensors)}
        self.messages: list[Message] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.add_.Tensor, aten.copy_.default):
            dst, src = args[0], args[1]
            i, j = self.device_of[memory(src)], self.device_of[memory(dst)]
            assert i != j, "a device copies to itself"
            if src.numel():
                self.messages.append(Message(i, j, src.numel() * src.element_size(), dst.storage_offset()))
        elif func is not torch.ops.prim.device.default:  # which only asks
            assert func.is_view, f"{func} moves data that nobody counted"
        return result

    def sent(self) -> list[int]:
        return [sum(m.num_bytes for m in self.messages if m.src == i) for i in self.devices]

    def received(self) -> list[int]:
        return [sum(m.num_bytes for m in self.messages if m.dst == i) for i in self.devices]

    def rounds(self) -> int:
        """Rounds taken if a message leaves once its data is there and both ends are free: one out, one in at a time."""
        last: Counter[tuple[str, Any]] = Counter()  # the last round in which this end, or this memory, was busy
        for m in self.messages:
            read, written = (m.src, m.offset), (m.dst, m.offset)
            busy = [("sends", m.src), ("receives", m.dst), ("written", read), ("written", written)]
            now = max(1 + max(last[b] for b in busy), last["read", written])  # sent on in the round that replaces it
            last["sends", m.src] = last["receives", m.dst] = last["written", written] = now
            last["read", read] = max(now, last["read", read])
        return max(last.values(), default=0)


def memory(tensor: Tensor) -> int:
    """The storage's identity: one for all views, another for each empty tensor."""
    return int(tensor.untyped_storage()._cdata)


@each_algorithm
def test_cost_is_what_the_docstring_says(allreduce: Allreduce) -> None:
    for k in range(1, 9):
        tensors = [torch.ones(840) for _ in range(k)]  # 840 is divisible by 1..8
        with Traffic(tensors) as traffic:
            allreduce(tensors)
        cost = (len(traffic.messages), traffic.rounds(), max(traffic.sent()))
        assert cost == FORMULAS[allreduce](k, 840 * 4) and max(traffic.received()) == max(traffic.sent())


@each_algorithm
@pytest.mark.parametrize("k", [2, 3, 8])
def test_all_together_move_2_k_minus_1_times_the_data_whatever_its_size(allreduce: Allreduce, k: int) -> None:
    """In slices that differ by one element at most, and without a copy of a tensor that is laid out otherwise."""
    many = torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for tensor in (torch.ones(0), torch.ones(1), torch.ones(17), many):
        tensors = [tensor.clone() for _ in range(k)]
        with Traffic(tensors) as traffic:  # fails on clone
            allreduce(tensors)
        assert sum(traffic.sent()) == 2 * (k - 1) * tensor.nbytes
        if allreduce in (sharded_allreduce, ring_allreduce):
            sizes = {m.num_bytes // 4 for m in traffic.messages}
            assert sizes <= {tensor.numel() // k, tensor.numel() // k + 1}


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cuda:2"], ["cuda:0", "cpu", "cuda:0"]], ids=str)
@each_algorithm
def test_no_operation_mixes_devices(allreduce: Allreduce, devices: list[str]) -> None:
    """Fake tensors have a device and no data: no GPU is needed, and an operation that mixes devices raises."""
    with FakeTensorMode():
        try:
            torch.empty(1, device="cuda:1").copy_(torch.empty(1, device="cuda:0"))
        except (RuntimeError, AssertionError):
            pytest.skip("this torch, as 2.8, makes no fake CUDA tensors without a driver")
        allreduce([torch.empty(6, 7, device=device) for device in devices])
