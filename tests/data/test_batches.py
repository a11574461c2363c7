"""The batch contract: the same global batches in the same order, for any number of processes."""

import random
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_mgpu.data import batch_loader

Batches = list[list[int]]


def a_trainer(device: str, world_size: int = 1, rank: int = 0) -> Any:
    """The attributes of a Trainer that `batch_loader` reads."""
    share = {"world_size": world_size, "global_rank": rank}
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(**share, overfit_batches=0, strategy=strategy)


def global_batches(
    num_processes: int, batch_size: int = 64, num_samples: int = 503, **options: Any
) -> Batches:
    """The global batches, each joined from the shares of all processes."""
    dataset, shares, epoch = TensorDataset(torch.arange(num_samples)), [], options.pop("epoch", 0)
    for rank in range(num_processes):
        loader = batch_loader(dataset, batch_size, a_trainer("cpu", num_processes, rank), **options)
        loader.sampler.set_epoch(epoch)
        shares.append([X.tolist() for (X,) in loader])
    return [list(chain(*parts)) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("batch_size", [64, 101, 503])
def test_processes_share_the_batches_of_one(batch_size: int) -> None:
    alone = global_batches(1, batch_size, shuffle=True, seed=1)
    assert [len(batch) for batch in alone[:-1]] == [batch_size] * (
        503 // batch_size - (503 % batch_size == 0)
    )
    assert sorted(chain(*alone)) == list(range(503))  # every sample once, the uneven rest too
    for num_processes in (2, 3, 4):
        assert global_batches(num_processes, batch_size, shuffle=True, seed=1) == alone


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = global_batches(1, shuffle=True, seed=1)
    torch.manual_seed(99)
    assert first == global_batches(1, shuffle=True, seed=1)
    assert first != global_batches(1, shuffle=True, seed=2)
    epochs = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = [global_batches(1, shuffle=True, seed=seed, epoch=epoch) for seed, epoch in epochs]
    assert all(a != b for a, b in combinations(orders, 2))  # as with seed + epoch they would not be


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
        loader = batch_loader(
            TensorDataset(torch.arange(10)), 3, shuffle=True, seed=1, num_workers=num_workers
        )
        loader.sampler.set_epoch(2)
        loader.load_state_dict({"num_yielded": first})  # of a run resumed within an epoch
        return [X.tolist() for (X,) in loader]

    assert batches(2) == batches(0) and len(batches(0)) == 4 - first


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_fn_gets_the_samples(num_workers: int) -> None:
    """Texts of any length are padded; x and y of one shape stay samples."""

    def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        x, y = zip(*samples)
        return torch.nn.utils.rnn.pad_sequence(x, batch_first=True), torch.stack(y)

    texts = [(torch.arange(n), torch.tensor(n)) for n in (3, 1, 2)]
    options = {"num_workers": num_workers, "collate_fn": padded}
    found = [
        (x.shape, y.tolist())
        for x, y in batch_loader(texts, 2, **options)  # type: ignore[arg-type]
    ]
    assert found == [((2, 3), [3, 1]), ((1, 2), [2])]
    pairs = TensorDataset(torch.zeros(5, 4), torch.ones(5, 4))
    assert [x.shape for x, _ in batch_loader(pairs, 5, **options)] == [(5, 4)]  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_last_batch_is_dropped(shuffle: bool) -> None:
    for num_processes in (1, 3):
        found = global_batches(num_processes, 64, shuffle=shuffle, seed=1, drop_last=True)
        assert [len(batch) for batch in found] == [64] * 7
        assert len({*chain(*found)}) == 448
    with pytest.raises(ValueError, match=r"data\.batch_size=504: drop_last drops all of 503"):
        global_batches(1, 504, shuffle=shuffle, drop_last=True)


class Noise(Dataset):
    """Draws from the three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_samples_draw_the_same_in_any_worker() -> None:
    """By seed, epoch and batch, in a run resumed within an epoch, too; others do not notice."""

    def drawn(seed: int = 1, epoch: int = 2, first: int = 0, **options: Any) -> list[list[float]]:
        loader = batch_loader(Noise(), 4, shuffle=True, seed=seed, **options)
        loader.sampler.set_epoch(0)
        before = list(loader)[:0]  # persistent workers have drawn already
        loader.sampler.set_epoch(epoch)
        loader.load_state_dict({"num_yielded": first})
        return before + [torch.stack(batch).tolist() for batch in loader]

    torch.manual_seed(0)
    found = drawn()
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0))
    assert drawn(num_workers=1) == drawn(num_workers=2, persistent_workers=True) == found
    assert drawn(first=1, num_workers=1) == found[1:]
    noise = [batch[1:] for other in (found, drawn(2), drawn(1, 3)) for batch in other]
    assert len({value for rows in noise for row in rows for value in row}) == 3 * 10 * 3


@pytest.mark.parametrize(
    ("root_device", "accelerator", "is_pinned"),
    [
        ("cuda:1", "cuda", True),
        ("xpu:0", "xpu", True),
        ("cpu", "cuda", False),  # pinning would start CUDA, which fails if the GPU is full
        ("cpu", None, False),
        ("mps:0", "mps", False),  # torch cannot pin for it
        ("xla:0", None, False),
    ],
)
def test_batches_are_pinned_for_the_trainers_device(
    root_device: str, accelerator: str | None, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = accelerator and torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    dataset, trainer = TensorDataset(torch.arange(10)), a_trainer(root_device)
    assert batch_loader(dataset, 3, trainer).pin_memory is is_pinned
    for wanted in (True, False):
        assert batch_loader(dataset, 3, trainer, pin_memory=wanted).pin_memory is wanted
    assert not batch_loader(dataset, 3).pin_memory


def test_batches_gathered_on_a_device_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for a GPU: a tensor there cannot be pinned."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    trainer, images = a_trainer("cuda:0"), TensorDataset(torch.empty(10, 2, device="meta"))
    assert not batch_loader(images, 3, trainer).pin_memory
    assert [X.shape for (X,) in batch_loader(images, 3, trainer)][-1] == (2, 2)
    indices = torch.arange(10, device="meta")
    assert not batch_loader(TensorDataset(torch.arange(10)), 3, trainer, indices=indices).pin_memory


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches_are_the_same(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, uneven last batch, and the batches left after a resume; only the copy is left out."""
    pinned: list[list[int]] = []

    def pin(batch: Any, device: str | None = None) -> Any:
        pinned.append(batch[0].tolist())
        return batch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", pin)

    def batches(pin_memory: bool) -> tuple[Batches, list[int]]:
        dataset, counts = TensorDataset(torch.arange(10)), []
        options = {"pin_memory": pin_memory, "num_workers": num_workers}
        loader = batch_loader(dataset, 3, shuffle=True, seed=1, **options)
        loader.load_state_dict({"num_yielded": 1})
        values = []
        for epoch in (2, 3):
            iterator = iter(loader)
            loader.sampler.set_epoch(epoch)  # after `iter`, as Lightning does
            for (X,) in iterator:
                values.append(X.tolist())
                counts.append(loader.state_dict()["num_yielded"])
        return values, counts

    assert batches(True) == batches(False)
    values, counts = batches(True)
    assert counts == [2, 3, 4, 1, 2, 3, 4] and len(values[2]) == 1
    assert sorted(pinned) == sorted(values * 2)  # workers finish in any order
