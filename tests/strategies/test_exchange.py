"""Rows: dense copies of gradients, in the owners' hands while they are summed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgpu.allreduce import foreach_allreduce, ring_allreduce, textbook_allreduce
from lightning_mgpu.strategies.exchange import Exchange

CPU = torch.device("cpu")


def exchange(
    parameters: list[Tensor],
    allreduce: Callable[..., Any] = textbook_allreduce,
    replicas: int = 3,
    processes: int = 1,
    rank: int = 0,
) -> Exchange:
    strategy = SimpleNamespace(
        allreduce=allreduce,
        gather=lambda row, purpose: row,
        num_local=replicas,
        world_size=processes,
        global_rank=rank,
        is_alone=processes == 1,
        is_one_machine=False,
        root_device=CPU,
    )
    return Exchange(strategy, dict.fromkeys(parameters), 0)


PARAMETERS = [
    torch.zeros(3, 5, dtype=torch.float64),
    torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.zeros(()),
    torch.zeros(0, 4),
    torch.zeros(7, dtype=torch.bfloat16),
    torch.zeros(5, dtype=torch.complex64),
    torch.zeros(4, 3).t(),
]


@pytest.mark.parametrize("allreduce", [textbook_allreduce, ring_allreduce, foreach_allreduce])
def test_sums_of_every_kind_of_parameter(allreduce: Callable[..., Any]) -> None:
    """Gradients need not be laid out as their parameters; sums are. A missing one is zeros."""
    torch.manual_seed(0)
    rows = exchange(PARAMETERS, allreduce)
    for num_missing in (0, 1, 2):  # what a row had before does not count
        gradients = [
            [torch.randint(-9, 9, p.shape).to(p.dtype) for p in PARAMETERS] for _ in range(3)
        ]
        for replica, each in enumerate(gradients):
            rows.write(replica, [None] * len(each) if replica < num_missing else each)
        sums, _ = rows.sum([True] * len(PARAMETERS))
        parts_of_all = zip(*gradients[num_missing:])
        for p, total, (first, *others) in zip(PARAMETERS, sums, parts_of_all, strict=True):
            assert total is not None and total.stride() == p.stride() and total.dtype == p.dtype
            assert torch.equal(total, sum(others, first))


def test_many_gets_all_rows_in_one_call() -> None:
    """But those of a parameter for which no replica has a gradient: its sum is missing, too."""
    calls: list[int] = []

    def single(tensors: list[Tensor]) -> None:
        raise AssertionError

    def many(rows: list[list[Tensor]]) -> None:
        calls.append(len(rows))
        foreach_allreduce.many(rows)  # type: ignore[attr-defined]

    single.many = many  # type: ignore[attr-defined]
    rows = exchange([torch.zeros(2), torch.zeros(3), torch.zeros(1)], single, replicas=2)
    for replica in range(2):
        rows.write(replica, [torch.ones(2), None, torch.ones(1)])
    first, second, _ = rows.sum([True, False, True])[0]
    assert calls == [2] and second is None and first is not None and first.tolist() == [2, 2]


@pytest.mark.parametrize("sizes", [[100] * 30, [5000, 10, 10, 5000, 10, 5000], [1], [64, 0, 9000]])
def test_owners_have_about_as_many_bytes(sizes: list[int]) -> None:
    parameters = [torch.zeros(size) for size in sizes]
    ranks = [exchange(parameters, processes=3, rank=rank) for rank in range(3)]
    owned = [index for each in ranks for index in range(len(sizes))[each.mine]]
    assert owned == list(range(len(sizes)))  # each has one owner
    assert all(each.sizes == ranks[0].sizes for each in ranks)
    num_bytes = sum(ranks[0].sizes)
    assert max(ranks[0].sizes) <= num_bytes / 3 + 4 * max(sizes) + 64
    for each in ranks:
        assert [len(row) for row in each.owned_rows] == [3 * 3] * len(each.owned_rows)
