"""The batch contract for any dataset: the same global batches in the same order, whatever the number of processes."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_mgpu.data import batch_loader

Batches = list[list[int]]


def global_batches(num_processes: int, batch_size: int = 64, num_samples: int = 503, **options: Any) -> Batches:
    """The batches, every one put together from the shares of all processes."""
    dataset, shares, epoch = TensorDataset(torch.arange(num_samples)), [], options.pop("epoch", 0)
    for rank in range(num_processes):
        on_cpu = SimpleNamespace(root_device=torch.device("cpu"))
        trainer: Any = SimpleNamespace(world_size=num_processes, global_rank=rank, overfit_batches=0, strategy=on_cpu)
        loader = batch_loader(dataset, batch_size, trainer, **options)
        loader.sampler.set_epoch(epoch)
        shares.append([X.tolist() for (X,) in loader])
    return [list(chain(*parts)) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("batch_size", [64, 101, 503])
def test_processes_share_the_batches_of_one(batch_size: int) -> None:
    alone = global_batches(1, batch_size, shuffle=True, seed=1)
    assert [len(batch) for batch in alone[:-1]] == [batch_size] * (503 // batch_size - (503 % batch_size == 0))
    assert sorted(chain(*alone)) == list(range(503))  # every sample once, the uneven rest too
    for num_processes in (2, 3, 4):
        assert global_batches(num_processes, batch_size, shuffle=True, seed=1) == alone


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = global_batches(1, shuffle=True, seed=1)
    torch.manual_seed(99)
    assert first == global_batches(1, shuffle=True, seed=1)
    assert first != global_batches(1, shuffle=True, seed=2)
    assert first != global_batches(1, shuffle=True, seed=1, epoch=1)


@pytest.mark.parametrize("num_samples", [10_007, 3, 257])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_evaluation_sees_every_sample_once_in_order(num_samples: int, num_processes: int) -> None:
    batches = global_batches(num_processes, 256, num_samples)
    assert list(chain(*batches)) == list(range(num_samples))
    assert max(map(len, batches)) <= 256 and len(batches) == -(-num_samples // 256)


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.batch_size=2 .* 3 processes cannot share"):
        global_batches(3, 2, shuffle=True)
    with pytest.raises(ValueError, match="leaves a global batch of 1 of 5 samples"):
        global_batches(2, 4, 5, shuffle=True)
    global_batches(2, 4, 6, shuffle=True)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))


def test_a_datasets_own_getitem_makes_its_samples() -> None:
    for kind, factor in ((TensorDataset, 1), (Doubled, 2)):
        values = [X.tolist() for (X,) in batch_loader(kind(torch.arange(5)), 3)]
        assert values == [[0, factor, 2 * factor], [3 * factor, 4 * factor]]


@pytest.mark.parametrize("first", [0, 2])
def test_workers_give_the_same_batches(first: int) -> None:
    def batches(num_workers: int) -> Batches:
        loader = batch_loader(TensorDataset(torch.arange(10)), 3, shuffle=True, seed=1, num_workers=num_workers)
        loader.sampler.set_epoch(2)
        loader.load_state_dict({"num_yielded": first})  # of a run resumed within an epoch
        return [X.tolist() for (X,) in loader]

    assert batches(2) == batches(0) and len(batches(0)) == 4 - first


@pytest.mark.parametrize(
    ("device", "indices", "given", "is_pinned"),
    [
        ("cpu", torch.arange(6), {}, False),  # on a machine with a GPU, too: CUDA is left alone
        ("cuda:1", torch.arange(6), {}, True),
        ("xpu", torch.arange(6), {}, True),
        ("mps", torch.arange(6), {}, False),
        ("cuda", torch.arange(6, device="meta"), {}, False),  # gathered on the device
        ("cuda", torch.arange(6), {"pin_memory": False}, False),
    ],
)
def test_batches_are_pinned_for_the_device_they_go_to(
    monkeypatch: pytest.MonkeyPatch, device: str, indices: torch.Tensor, given: dict[str, bool], is_pinned: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=1, global_rank=0, overfit_batches=0)
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    assert batch_loader(dataset, 2, trainer, indices=indices, **given).pin_memory is is_pinned
