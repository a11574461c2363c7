"""Every algorithm against the sum computed in float64, over shapes, layouts, dtypes and numbers of devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_mgpu.allreduce import (
    Allreduce,
    ring_allreduce,
    sharded_allreduce,
    textbook_allreduce,
    tree_allreduce,
)

ALGORITHMS = [textbook_allreduce, tree_allreduce, sharded_allreduce, ring_allreduce]

# How to lay the given values out in memory; every layout but the contiguous one has other strides or holes.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "0-d": ((), lambda x: x),
    "empty": ((0,), lambda x: x),
    "empty-2d": ((3, 0), lambda x: x),
    "one": ((1,), lambda x: x),
    "smaller-than-k": ((3,), lambda x: x),
    "prime": ((17,), lambda x: x),
    "divisible": ((840,), lambda x: x),
    "2-d": ((5, 7), lambda x: x),
    "4-d": ((4, 3, 5, 5), lambda x: x),
    "channels_last": ((4, 3, 5, 5), lambda x: x.to(memory_format=torch.channels_last)),
    "channels_last-1x1": ((4, 3, 1, 1), lambda x: x.to(memory_format=torch.channels_last)),
    "transposed": ((5, 7), lambda x: x.t().contiguous().t()),
    "columns-of-a-larger-one": ((5, 7), lambda x: torch.cat([x, x], dim=1)[:, :7]),
    "every-other": ((17,), lambda x: x.repeat_interleave(2)[::2]),
}


def filled(layout: str, k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """k tensors of the layout with small integers in them: their sums are exact in every dtype and order."""
    shape, lay_out = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(k)
    return [lay_out(torch.randint(-9, 10, shape, generator=generator).to(dtype)).detach() for _ in range(k)]


def check(allreduce: Allreduce, tensors: list[Tensor]) -> None:
    """Run it, and assert all that the contract says about exact inputs."""
    total = torch.stack([t.detach().double() for t in tensors]).sum(0)
    slots, strides, memory = list(tensors), [t.stride() for t in tensors], [t.data_ptr() for t in tensors]
    assert allreduce(tensors) is None  # type: ignore[func-returns-value]
    assert all(now is before for now, before in zip(tensors, slots, strict=True)), "a slot was rebound"
    assert [t.data_ptr() for t in tensors] == memory
    assert [t.stride() for t in tensors] == strides
    for i, t in enumerate(tensors):
        assert torch.equal(t.double(), total), f"device {i} got {t} instead of {total}"


@pytest.fixture(params=ALGORITHMS, ids=lambda f: f.__name__)
def allreduce(request: pytest.FixtureRequest) -> Allreduce:
    algorithm: Allreduce = request.param
    return algorithm


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_sum(allreduce: Allreduce, layout: str, k: int) -> None:
    check(allreduce, filled(layout, k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["0-d", "prime", "channels_last", "every-other"])
def test_dtypes(allreduce: Allreduce, layout: str, dtype: torch.dtype) -> None:
    tensors = filled(layout, 3, dtype)
    check(allreduce, tensors)
    assert all(t.dtype == dtype for t in tensors)


@pytest.mark.parametrize("k", range(1, 9))
def test_real_numbers_agree_to_rounding_and_replicas_to_the_bit(allreduce: Allreduce, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    inputs = [torch.randn(17, 3, generator=generator, dtype=torch.float64) for _ in range(k)]
    first, again = [x.clone() for x in inputs], [x.clone() for x in inputs]
    allreduce(first)
    allreduce(again)
    for t, repeated in zip(first, again, strict=True):
        torch.testing.assert_close(t, torch.stack(inputs).sum(0), rtol=1e-13, atol=1e-13)
        assert torch.equal(t, first[0])
        assert torch.equal(t, repeated)


def test_every_tensor_laid_out_in_its_own_way(allreduce: Allreduce) -> None:
    plain = filled("4-d", 4)
    strided = torch.stack([plain[3], plain[3]], dim=-1)[..., 0]
    check(allreduce, [plain[0], plain[1].to(memory_format=torch.channels_last), plain[2].mT.contiguous().mT, strided])


def test_memory_beside_a_view_is_left_alone(allreduce: Allreduce) -> None:
    wholes = [torch.full((5, 9), float(i)) for i in range(3)]
    check(allreduce, [w[1:4, 2:7] for w in wholes])
    for i, w in enumerate(wholes):
        w[1:4, 2:7] = i
        assert (w == i).all()


def test_leaves_that_require_grad(allreduce: Allreduce) -> None:
    tensors = [t.requires_grad_() for t in filled("prime", 3)]
    check(allreduce, tensors)
    assert all(t.is_leaf and t.requires_grad and t.grad_fn is None for t in tensors)


@pytest.mark.parametrize("layout", ["0-d", "channels_last", "columns-of-a-larger-one"])
def test_in_inference_mode(allreduce: Allreduce, layout: str) -> None:
    from_outside = filled(layout, 3)
    with torch.inference_mode():
        check(allreduce, from_outside)
        check(allreduce, filled(layout, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0", "cuda:0"]], ids=str)
def test_on_a_gpu(allreduce: Allreduce, devices: list[str]) -> None:
    for layout in LAYOUTS:
        tensors = [t.to(device, copy=True) for t, device in zip(filled(layout, len(devices)), devices, strict=True)]
        total = torch.stack([t.cpu() for t in tensors]).sum(0)
        allreduce(tensors)
        for t, device in zip(tensors, devices, strict=True):
            assert t.device == torch.device(device)
            assert torch.equal(t.cpu(), total), f"{device} got {t} instead of {total} for {layout}"
