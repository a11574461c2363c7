"""Messages, bytes and rounds of every algorithm, counted from what torch executes, against the docstrings' formulas.

`Traffic` sees each operation below autograd and looks up whose memory it reads and writes: an `add_` or `copy_` from
the memory of device i to that of device j is a message. Anything else that moves data fails the test, so the counts are
complete, and the algorithms carry no counters.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

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


@dataclass
class Cost:
    """For k devices and tensors of n bytes."""

    messages: int
    rounds: int
    busiest: float  # bytes that the device with most to do sends, and receives


def textbook(k: int, n: int) -> Cost:
    return Cost(messages=2 * (k - 1), rounds=2 * (k - 1), busiest=(k - 1) * n)


def tree(k: int, n: int) -> Cost:
    return Cost(messages=2 * (k - 1), rounds=2 * ceil(log2(k)), busiest=ceil(log2(k)) * n)


def bandwidth_optimal(k: int, n: int) -> Cost:
    return Cost(messages=2 * k * (k - 1), rounds=2 * (k - 1), busiest=2 * (k - 1) * n / k)


FORMULAS: dict[Allreduce, Callable[[int, int], Cost]] = {
    textbook_allreduce: textbook,
    blocked_allreduce: textbook,
    tree_allreduce: tree,
    sharded_allreduce: bandwidth_optimal,
    ring_allreduce: bandwidth_optimal,
}


@dataclass
class Message:
    src: int
    dst: int
    num_bytes: int
    read: tuple[int, int]  # device and offset of the memory sent
    written: tuple[int, int]


class Traffic(TorchDispatchMode):
    """Records the messages between `tensors`, one a device, while it is entered."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.num_devices = len(tensors)
        self.device_of = {memory(t): i for i, t in enumerate(tensors)}
        assert len(self.device_of) == len(tensors), "two tensors share their memory"
        self.messages: list[Message] = []
        self.crossings: list[Tensor] = []  # what `.to(another device)` allocated, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default:  # on its way: the message counts when it is added
            assert result.device != args[0].device
            self.device_of[memory(result)] = self.device_of[memory(args[0])]
            self.crossings.append(result)
        elif func in (aten.add_.Tensor, aten.copy_.default):
            dst, src = args[0], args[1]
            i, j = self.device_of[memory(src)], self.device_of[memory(dst)]
            assert i != j, "a device copies to itself"
            if src.numel():
                ends = ((i, dst.storage_offset()), (j, dst.storage_offset()))  # slices keep their place on all devices
                self.messages.append(Message(i, j, src.numel() * src.element_size(), *ends))
        elif func is not torch.ops.prim.device.default:  # which only asks
            assert func.is_view, f"{func} moves data that nobody counted"
        return result

    def sent(self) -> list[int]:
        return [sum(m.num_bytes for m in self.messages if m.src == i) for i in range(self.num_devices)]

    def received(self) -> list[int]:
        return [sum(m.num_bytes for m in self.messages if m.dst == i) for i in range(self.num_devices)]

    def rounds(self) -> int:
        """Rounds taken if a message leaves once its data is there and both ends are free: one out, one in at a time."""
        last: Counter[tuple[str, Any]] = Counter()  # the last round in which this end, or this memory, was busy
        for m in self.messages:
            busy = [("sends", m.src), ("receives", m.dst), ("written", m.read), ("written", m.written)]
            now = max(1 + max(last[b] for b in busy), last["read", m.written])  # sent on in the round that replaces it
            last["sends", m.src] = last["receives", m.dst] = last["written", m.written] = now
            last["read", m.read] = max(now, last["read", m.read])
        return max(last.values(), default=0)


def memory(tensor: Tensor) -> int:
    """The storage's identity: one for all views, another for each empty tensor; fake tensors have it too."""
    return int(tensor.untyped_storage()._cdata)


@pytest.fixture(params=FORMULAS, ids=lambda f: f.__name__)
def allreduce(request: pytest.FixtureRequest) -> Allreduce:
    algorithm: Allreduce = request.param
    return algorithm


@pytest.mark.parametrize("k", range(1, 9))
def test_cost_is_what_the_docstring_says(allreduce: Allreduce, k: int) -> None:
    tensors = [torch.ones(840) for _ in range(k)]  # 840 is divisible by 1..8
    with Traffic(tensors) as traffic:
        allreduce(tensors)
    cost = FORMULAS[allreduce](k, 840 * 4)
    assert len(traffic.messages) == cost.messages
    assert traffic.rounds() == cost.rounds
    assert max(traffic.sent()) == max(traffic.received()) == cost.busiest


@pytest.mark.parametrize("k", range(2, 9))
@pytest.mark.parametrize("num_elements", [0, 1, 5, 17, 841])
def test_all_together_move_2_k_minus_1_times_the_data_whatever_its_size(
    allreduce: Allreduce, num_elements: int, k: int
) -> None:
    tensors = [torch.ones(num_elements) for _ in range(k)]
    with Traffic(tensors) as traffic:
        allreduce(tensors)
    assert sum(traffic.sent()) == 2 * (k - 1) * num_elements * 4


@pytest.mark.parametrize("allreduce", [sharded_allreduce, ring_allreduce], ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", range(2, 9))
def test_uneven_slices_differ_by_one_element(allreduce: Allreduce, k: int) -> None:
    tensors = [torch.ones(840 + k - 1) for _ in range(k)]
    with Traffic(tensors) as traffic:
        allreduce(tensors)
    sizes = {m.num_bytes // 4 for m in traffic.messages}
    assert sizes == {840 // k, 840 // k + 1}
    assert max(traffic.sent() + traffic.received()) <= 2 * (k - 1) * (840 // k + 1) * 4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_dense_tensors_are_sliced_without_a_copy(allreduce: Allreduce, memory_format: torch.memory_format) -> None:
    tensors = [torch.ones(4, 3, 5, 5).to(memory_format=memory_format) for _ in range(3)]
    with Traffic(tensors) as traffic:  # fails on clone
        allreduce(tensors)
    assert max(traffic.sent()) == FORMULAS[allreduce](3, 300 * 4).busiest


def fakes_cuda() -> bool:
    """Whether this torch works with fake CUDA tensors without a driver: 2.8 does not."""
    try:
        with FakeTensorMode():
            textbook_allreduce([torch.empty(1, device="cuda:1"), torch.empty(1, device="cuda:0")])
    except (RuntimeError, AssertionError):
        return False
    return True


@pytest.mark.skipif(not fakes_cuda(), reason="this torch makes no fake CUDA tensors without a driver")
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cuda:2"], ["cuda:0", "cpu", "cuda:0"]], ids=str)
def test_only_messages_cross_devices(allreduce: Allreduce, devices: list[str]) -> None:
    """Fake tensors have a device and no data: no GPU is needed, and an operation that mixes devices raises."""
    with FakeTensorMode():
        tensors = [torch.empty(6, 7, device=device) for device in devices]
        with Traffic(tensors) as traffic:
            allreduce(tensors)
    cost = FORMULAS[allreduce](3, 6 * 7 * 4)
    assert len(traffic.messages) == cost.messages
    assert max(traffic.sent()) == max(traffic.received()) == cost.busiest
    # a sum needs its term on the device that adds, a copy needs no memory beside its ends
    sums = traffic.messages[: cost.messages // 2]
    crossing = [m for m in sums if devices[m.src] != devices[m.dst]]
    assert [t.numel() * t.element_size() for t in traffic.crossings] == [m.num_bytes for m in crossing]
    assert [str(t.device) for t in traffic.crossings] == [devices[m.dst] for m in crossing]
