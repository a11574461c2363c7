"""Every algorithm against the sum in float64, over shapes, layouts, dtypes, numbers of devices."""

import pytest
import torch

from lightning_mgpu import allreduce as algorithms
from lightning_mgpu.allreduce import check_allreduce

NAMES = ["textbook", "key_value", "tree", "sharded", "ring", "halving_doubling"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# How to lay the values out in memory; the last three are not contiguous, or have holes.
LAYOUTS = {
    "0-d": ((), lambda x: x),
    "empty": ((0,), lambda x: x),
    "smaller-than-k": ((3,), lambda x: x),
    "prime": ((17,), lambda x: x),
    "channels_last": ((4, 3, 5, 5), lambda x: x.to(memory_format=torch.channels_last)),
    "transposed": ((5, 7), lambda x: x.t().contiguous().t()),
    "columns-of-a-larger-one": ((5, 7), lambda x: torch.cat([x, x], dim=1)[:, :7]),
}


@pytest.fixture(params=NAMES)
def allreduce(request):
    algorithm = getattr(algorithms, f"{request.param}_allreduce")
    return algorithm


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_sum(allreduce, layout):
    shape, lay_out = LAYOUTS[layout]
    for k in (1, 2, 4, 8) if hasattr(allreduce, "powers_of_two") else (1, 2, 3, 4, 5, 8):
        for dtype in DTYPES:
            tensors = [lay_out(torch.randint(-9, 10, shape).to(dtype)) for _ in range(k)]
            tensors[0].requires_grad_(dtype is torch.float32)  # a parameter works, too
            total = torch.stack([t.detach().double() for t in tensors]).sum(0)
            before = [(id(t), t.dtype, t.stride(), t.data_ptr()) for t in tensors]
            with torch.inference_mode(k == 3):
                allreduce(tensors)
            assert [(id(t), t.dtype, t.stride(), t.data_ptr()) for t in tensors] == before
            assert all(torch.equal(t.double(), total) for t in tensors), (k, dtype)


def test_real_numbers_agree_to_rounding_and_replicas_to_the_bit(allreduce):
    for k in (1, 2, 4, 8) if hasattr(allreduce, "powers_of_two") else range(1, 9):
        check_allreduce(allreduce, [torch.device("cpu")] * k, as_written=k in (2, 4))


def test_halving_and_doubling_needs_a_power_of_two():
    with pytest.raises(ValueError, match=r"^6 devices: halving_doubling needs 1, 2, 4, 8"):
        algorithms.halving_doubling_allreduce([torch.zeros(3)] * 6)
    counts = [algorithms.counts_to_check(f, 8) for f in vars(algorithms).values() if callable(f)]
    assert [4, 8] in counts and [3, 4, 8] in counts
