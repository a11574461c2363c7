"""Which tensors travel together, and that each arrives where it belongs."""

import pytest
import torch

from lightning_mgpu.allreduce import messages
from lightning_mgpu.allreduce.messages import add_all, buckets, copy_all, on_device

OTHER = torch.device("sim", 1) if hasattr(torch, "sim") else torch.device("meta")


def some(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype) for shape in shapes
    ]


def test_a_message_has_one_dtype_and_is_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BUCKET_BYTES", 40)
    tensors = [*some((4,)), *some((2,), dtype=torch.int64), *some((6,), (1,), (100,), ())]
    assert list(buckets(tensors, tensors)) == [[0, 2], [3], [4], [5], [1]]
    assert list(buckets([], [])) == []
    sparse = torch.eye(3).to_sparse()
    elsewhere = torch.empty(4, device="meta")
    assert list(buckets([sparse, elsewhere, *some((4,))], [sparse, *some((4,), (4,))])) == [
        [0],
        [1],
        [2],
    ]


def test_bfloat16_and_layouts_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, 0-d, empty, channels_last: by value, whatever the order of bytes."""
    sources = [*some((2, 3), (), (0, 2)), some((3, 2))[0].T, *some((2,), dtype=torch.bfloat16)]
    sources.append(some((2, 3, 2, 2))[0].to(memory_format=torch.channels_last))
    targets = [torch.full_like(source, 7) for source in sources]
    copy_all(targets, sources)
    add_all(targets, sources, alpha=2)
    for target, source in zip(targets, sources):
        assert torch.equal(target, source * 3)


def test_several_tensors_are_one_copy() -> None:
    sources = some((2, 3), (4,), ())
    moved = on_device(sources, OTHER)
    assert [(each.shape, each.device.type) for each in moved] == [
        (s.shape, OTHER.type) for s in sources
    ]
    assert len({each.untyped_storage()._cdata for each in moved}) == 1
    assert on_device(sources, torch.device("cpu"))[0] is sources[0]
    if OTHER.type == "sim":
        assert all(torch.equal(each.cpu(), source) for each, source in zip(moved, sources))
        back = [torch.empty_like(source) for source in sources]
        copy_all(back, moved)
        assert all(torch.equal(each, source) for each, source in zip(back, sources))
