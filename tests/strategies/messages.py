"""`python messages.py RANK NUM PORT`: a process that sends and gets messages, then sees faults."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mgpu.strategies.processes import Memory, Processes

rank, num, port = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, num, rank == 0, timedelta(seconds=60))


def processes(name: str, seconds: float = 60.0) -> Processes:
    group = dist.PrefixStore(name, store)
    return Processes(torch.device("cpu"), rank, num, seconds, group)


def error(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


def values_arrive_as_they_were() -> None:
    all_of_them = processes("values")
    layer, shared = nn.Linear(2, 2), torch.full((3,), float(rank))
    all_of_them.known = [layer]
    X = torch.arange(60.0).view(3, 4, 5) + rank
    value = {
        "text": "x" * 5000 * rank,  # longer and shorter than a frame
        "transposed": X.permute(2, 0, 1),
        "column": X[:, 0, 0],
        "expanded": torch.full((1, 1), rank).expand(2, 3),
        "empty": torch.empty(0, 3),
        "loss": torch.tensor(0.5, requires_grad=True),
        "bools": torch.tensor([True, False]),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.eye(2).to_sparse(),
        "known": layer,
        "twice": [shared, shared],
    }
    for i, got in enumerate(all_of_them.share("values", value)):
        assert len(got["text"]) == 5000 * i
        assert torch.equal(got["transposed"], (X - rank + i).permute(2, 0, 1))
        assert got["transposed"].stride() == value["transposed"].stride()
        assert torch.equal(got["column"], X[:, 0, 0] - rank + i)
        assert got["expanded"].tolist() == [[i] * 3] * 2
        assert got["empty"].shape == (0, 3) and got["loss"].requires_grad and got["loss"] == 0.5
        assert got["bools"].tolist() == [True, False] and got["bf16"].dtype == torch.bfloat16
        assert got["complex"].sum() == 2 and got["sparse"].to_dense().trace() == 2
        assert got["known"] is layer
        assert got["twice"][0] is got["twice"][1] and got["twice"][0].tolist() == [i] * 3
    sent = [torch.tensor([rank, i]) for i in range(num)]
    assert [t.tolist() for t in all_of_them.exchange("each", sent)] == [
        [i, rank] for i in range(num)
    ]
    assert not dist.is_initialized()


def large_tensors_come_to_memory_that_is_used_again() -> None:
    all_of_them, memory = processes("large"), Memory()
    image = torch.arange(3 * 2**17.0).view(2, 64, 3, -1).permute(0, 3, 1, 2)  # channels last

    def other(step: int) -> Tensor:
        memory.begin()
        received = all_of_them.share("large", {"image": image + rank + step, "y": step}, 0, memory)
        got: Tensor = received[1 - rank if rank < 2 else 0]["image"]
        assert torch.equal(got, image + (1 - rank if rank < 2 else 0) + step)
        assert got.stride() == image.stride()
        return got

    place = other(0).data_ptr()
    held = other(1)[:, 1]
    assert held.data_ptr() - held.storage_offset() * 4 == place, "nothing used it any more"
    before = held.clone()
    assert other(2).data_ptr() != place, "a view still uses it"
    assert torch.equal(held, before)


def one_fails() -> None:
    all_of_them = processes("one fails")
    if rank == 1:
        all_of_them.fail(ValueError("sample 3\nis broken"))
    else:
        told = error(lambda: all_of_them.share("a step", 1))
        assert told == "process 1 has ended with ValueError: sample 3 is broken", told
    assert "have ended" in error(lambda: all_of_them.share("the next step", 1))


def all_fail() -> None:
    start = time.monotonic()
    processes("all fail").fail(ValueError("no"))
    assert time.monotonic() - start < 30, "they wait for each other"


def one_is_elsewhere() -> None:
    all_of_them = processes("elsewhere")
    place = "another step" if rank == 1 else "a step"
    told = error(lambda: all_of_them.share(place, 1))
    assert "'another step'" in told and "'a step'" in told, told


def one_has_what_cannot_be_sent() -> None:
    all_of_them = processes("cannot be sent")
    value = (lambda: 0) if rank == 1 else 0
    told = error(lambda: all_of_them.share("a step", value))
    if rank == 1:
        assert told.startswith("a step has something that other processes cannot be sent"), told
        all_of_them.fail(TypeError(told))
    else:
        assert told.startswith("process 1 has ended with TypeError: a step has something"), told


def one_hangs() -> None:
    all_of_them = processes("one hangs", seconds=1.0)
    if rank == 1:
        time.sleep(3)
    else:
        told = error(lambda: all_of_them.share("a step", 1))
        where = f"for which process {rank} waits at 'a step'"
        assert told == f"process 1 does not answer for 1 s, {where}", told


def one_is_killed() -> None:
    all_of_them = processes("one is killed")
    if rank == 1:
        print("done", flush=True)
        os.kill(os.getpid(), 9)
    time.sleep(rank)  # process 2 finds its connection closed
    told = error(lambda: all_of_them.share("a step", 1))
    assert "has ended, for which process" in told, told


for act in (
    values_arrive_as_they_were,
    large_tensors_come_to_memory_that_is_used_again,
    *(one_fails, all_fail, one_is_elsewhere, one_has_what_cannot_be_sent),
    *(one_hangs, one_is_killed),
):
    act()
print("done", flush=True)
