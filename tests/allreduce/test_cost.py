"""Messages and bytes of every algorithm, from what torch executes, against docstrings' formulas."""

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mgpu import allreduce as algorithms

aten = torch.ops.aten
SERVER = 8  # the device of a key-value store, after the devices 0 .. 7
# For k devices and tensors of n bytes: messages, and bytes that the busiest sends, and receives.
FORMULAS: dict[str, Callable[[int, int], tuple[int, float]]] = {
    "textbook": lambda k, n: (2 * (k - 1), (k - 1) * n),
    "key_value": lambda k, n: (2 * k, k * n),
    "tree": lambda k, n: (2 * (k - 1), ceil(log2(k)) * n),
    "sharded": lambda k, n: (2 * k * (k - 1), 2 * (k - 1) * n / k),
    "ring": lambda k, n: (2 * k * (k - 1), 2 * (k - 1) * n / k),
}


class Traffic(TorchDispatchMode):
    """Records the messages between `tensors`, one per device, while it is entered.

    An `add_` or `copy_` from the memory of device i to that of device j is a message; new memory is
    the server's. Anything else that moves data fails, so the counts are complete.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)  # keeps the server's, too: their memory is not used again
        self.device_of = {memory(t): i for i, t in enumerate(tensors)}
        self.num_messages, self.sent, self.received = 0, [0] * 9, [0] * 9

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.add_.Tensor, aten.copy_.default):
            dst, src = args[0], args[1]
            i, j = self.device_of[memory(src)], self.device_of[memory(dst)]
            assert i != j or i == SERVER, "a device copies to itself"
            if i != j and src.numel():
                self.num_messages += 1
                self.sent[i] += src.nbytes
                self.received[j] += src.nbytes
        elif func is aten.empty_like.default:
            self.tensors.append(result)
            self.device_of[memory(result)] = SERVER
        elif func is not torch.ops.prim.device.default:  # which only asks
            assert func.is_view, f"{func} moves data that is not counted"
        return result


def memory(tensor: Tensor) -> int:
    """The storage's identity: one for all views, another for each empty tensor."""
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("name", FORMULAS)
def test_cost_is_what_the_docstring_says_and_nothing_is_copied(name: str) -> None:
    images = torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for k in range(1, 9):
        # 840 is divisible by 1..8
        for tensor in (torch.ones(840), torch.ones(0), torch.ones(1), torch.ones(17), images):
            tensors = [tensor.clone() for _ in range(k)]
            with Traffic(tensors) as traffic:  # fails on clone
                getattr(algorithms, f"{name}_allreduce")(tensors)
            assert sum(traffic.sent) == 2 * (k - (name != "key_value")) * tensor.nbytes
            if len(tensor) == 840:
                assert max(traffic.received) == max(traffic.sent)
                assert (traffic.num_messages, max(traffic.sent)) == FORMULAS[name](k, 840 * 4)
