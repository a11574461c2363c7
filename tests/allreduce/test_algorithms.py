"""Every algorithm against the sum in float64, over shapes, layouts, dtypes, numbers of devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_mgpu.allreduce import (
    Allreduce,
    allreduce_many,
    blocked_allreduce,
    check_allreduce,
    compiled_allreduce,
    foreach_allreduce,
    ring_allreduce,
    sharded_allreduce,
    textbook_allreduce,
    tree_allreduce,
)

OF_LARGE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    Tensor.t,
    lambda x: x[:, ::2],
    lambda x: x.flatten()[::2],
]
IN_THE_TEXTBOOKS_ORDER = [blocked_allreduce, foreach_allreduce, compiled_allreduce]
ALGORITHMS = [
    textbook_allreduce,
    tree_allreduce,
    sharded_allreduce,
    ring_allreduce,
    *IN_THE_TEXTBOOKS_ORDER,
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# How to lay the values out in memory; all layouts but the contiguous have other strides or holes.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "0-d": ((), lambda x: x),
    "empty": ((0,), lambda x: x),
    "one": ((1,), lambda x: x),
    "smaller-than-k": ((3,), lambda x: x),
    "prime": ((17,), lambda x: x),
    "4-d": ((4, 3, 5, 5), lambda x: x),
    "channels_last": ((4, 3, 5, 5), lambda x: x.to(memory_format=torch.channels_last)),
    "transposed": ((5, 7), lambda x: x.t().contiguous().t()),
    "columns-of-a-larger-one": ((5, 7), lambda x: torch.cat([x, x], dim=1)[:, :7]),
    "every-other": ((17,), lambda x: x.repeat_interleave(2)[::2]),
}


def filled(layout: str, k: int, dtype: torch.dtype) -> list[Tensor]:
    """k tensors of the layout, of small integers: their sums are exact in every dtype and order."""
    shape, lay_out = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(k)
    return [
        lay_out(torch.randint(-9, 10, shape, generator=generator).to(dtype)).detach()
        for _ in range(k)
    ]


def check(allreduce: Allreduce, tensors: list[Tensor]) -> None:
    total = torch.stack([t.detach().double() for t in tensors]).sum(0)
    before = [(id(t), t.dtype, t.stride(), t.data_ptr()) for t in tensors]
    allreduce(tensors)
    assert [(id(t), t.dtype, t.stride(), t.data_ptr()) for t in tensors] == before, "not in place"
    for i, t in enumerate(tensors):
        assert torch.equal(t.double(), total), f"device {i} got {t} instead of {total}"


@pytest.fixture(params=ALGORITHMS, ids=lambda f: f.__name__)
def allreduce(request: pytest.FixtureRequest) -> Allreduce:
    algorithm: Allreduce = request.param
    return algorithm


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_sum(allreduce: Allreduce, layout: str, k: int) -> None:
    for dtype in DTYPES:
        check(allreduce, filled(layout, k, dtype))


def test_real_numbers_agree_to_rounding_and_replicas_to_the_bit(allreduce: Allreduce) -> None:
    for k in range(1, 9):
        check_allreduce(allreduce, [torch.device("cpu")] * k)


def test_on_parameters_and_in_inference_mode(allreduce: Allreduce) -> None:
    check(allreduce, [t.requires_grad_() for t in filled("prime", 3, torch.float32)])
    with torch.inference_mode():
        check(allreduce, filled("channels_last", 3, torch.float32))


@pytest.mark.parametrize("allreduce", IN_THE_TEXTBOOKS_ORDER, ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_all_gradients_at_once(allreduce: Allreduce, k: int) -> None:
    """The textbook's bits: contiguous float32, mixed layouts, large tensors, very many tensors."""

    def tensors(shape: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape) for _ in range(k)]

    plain = [tensors(shape) for shape in [(20, 1, 3, 3), (300, 97), (), (0,), (17,)]]
    odd = [[t.to(memory_format=torch.channels_last) for t in tensors((8, 3, 5, 5))]]
    odd += [[t.to(torch.bfloat16) for t in tensors((40, 700))]]
    # the large one gets a kernel of its own
    many = [tensors((17,)) for _ in range(700)] + [tensors((1100, 1000))]
    # larger than a block, and than what gets a kernel of its own; of no round size
    large = [
        [lay_out(t.to(dtype)) for t in tensors((701, 997))]
        for dtype in DTYPES
        for lay_out in OF_LARGE
    ]
    for gradients in ([], plain, plain + odd, large, many):
        expected = [[t.clone() for t in same] for same in gradients]
        for same in expected:
            textbook_allreduce(same)
        versions = [t._version for same in gradients for t in same]
        allreduce_many(allreduce, gradients)
        for same, e in zip(gradients, expected, strict=True):
            assert all(map(torch.equal, same, e))
        if k > 1:  # autograd must know that they changed
            assert all(
                t._version > v
                for t, v in zip([t for same in gradients for t in same], versions, strict=True)
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0", "cuda:0"]], ids=str
)
def test_on_a_gpu(allreduce: Allreduce, devices: list[str]) -> None:
    check_allreduce(allreduce, [torch.device(device) for device in devices])
