"""Runs the exchanges of all parameters together.

In a round, every exchange that is not over yields tensors. All of a replica's tensors travel in one
row of bytes, and every process gets the rows of all replicas.
"""

from collections import UserDict
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.shards import checksum

Exchange = Generator[Any, Any, Any]
MISSING, FINITE, NOT_FINITE = 0, 1, 2  # what a replica has of a parameter


class State(UserDict):
    """A dict in which an exchange keeps tensors and plain values of a parameter between steps."""

    def __init__(self, name: str, replica: int, num_replicas: int, data: dict[str, Any]) -> None:
        self.name, self.replica, self.num_replicas, self.data = name, replica, num_replicas, data


def exact(X: Tensor, state: Any) -> Exchange:
    """The book's allreduce, as one replica sees it: it sends the whole tensor."""
    return sum((yield X))


def run_exchanges(
    exchange: Any,
    parameters: dict[str, Tensor],
    replicas: list[dict[Tensor, Tensor]],  # the X of each replica here, by parameter
    states: Mapping[int, dict[Any, Any]],  # of the same replicas, by number; kept for the next step
    gather: Callable[[Tensor], Tensor],  # from the rows (r, n) of the replicas here to (k, n)
) -> tuple[dict[Tensor, Tensor], int]:
    """Returns the results, in memory laid out like the parameters, and a replica's bytes sent.

    Raises:
        RuntimeError: If replicas send or return what does not fit together.
    """
    looks = [[look_at(each.get(p)) for p in parameters.values()] for each in replicas]
    gathered = gather(torch.tensor(looks))
    running: dict[str, list[Any]] = {}
    results: dict[str, list[Any]] = {}
    for (name, p), look in zip(parameters.items(), gathered.amax(0).tolist()):
        if look == MISSING:
            continue
        running[name], results[name] = [], []
        for (replica, kept), tensors in zip(states.items(), replicas):
            X = tensors[p] if p in tensors else torch.zeros_like(p)
            X = X.clone(memory_format=torch.contiguous_format)
            if look == NOT_FINITE or not p.numel():  # all see it, and no state keeps it
                generator = exact(X, {})
            else:
                data = kept.setdefault((name, tuple(p.shape), str(p.dtype)), {})
                generator = exchange(X, State(name, replica, len(gathered), data))
            running[name].append(endless(generator, results[name]))
    received: dict[str, Any] = dict.fromkeys(running)
    num_bytes = 0
    while running:
        sent = {name: [each.send(received[name]) for each in running[name]] for name in running}
        layouts = [[checksum(describe(x)) for x in xs] for xs in zip(*sent.values())]
        checksums = gather(torch.tensor(layouts))
        for replica, i in (checksums != checksums[0]).nonzero().tolist():
            name, waiting = [*running.items()][i]
            lines = [each.gi_yieldfrom.gi_frame.f_lineno for each in waiting if each.gi_yieldfrom]
            where = f"{name}, waiting in line {lines}"
            raise RuntimeError(f"{where}: replica {replica} does not send what replica 0 sends")
        if not any(tensors_of(first) for first, *_ in sent.values()):
            break
        received, length = send(sent, gather)
        num_bytes += length
    found = {}
    for name, (first, *others) in results.items():
        p = parameters[name]
        if describe(first) != describe(p):
            raise RuntimeError(f"{name}: {describe(first)} is returned, not {describe(p)}, like X")
        if not all(torch.equal(to_bytes(each), to_bytes(first)) for each in others):
            raise RuntimeError(f"{name}: what is returned differs between replicas")
        found[p] = torch.empty_like(p).copy_(first)
    return found, num_bytes


def endless(generator: Exchange, results: list[Any]) -> Generator[Any, Any, Any]:
    """Once an exchange is over, it sends nothing in the rounds of the others."""
    if not isinstance(generator, Generator):
        raise TypeError("an exchange is a generator: it needs a `yield`")
    results.append((yield from generator))
    while True:
        yield ()


# in this mode, torch refuses to change new tensors in place: they belong to all replicas here
@torch.inference_mode()
def send(
    sent: dict[str, list[Any]], gather: Callable[[Tensor], Tensor]
) -> tuple[dict[str, list[Any]], int]:
    """What all replicas have yielded, by name, and the number of bytes of each."""
    parts = [[to_bytes(X) for x in xs for X in tensors_of(x)] for xs in zip(*sent.values())]
    rows = gather(torch.stack([*map(torch.cat, parts)]))
    received: dict[str, list[Any]] = {name: [] for name in sent}
    for row in rows:
        rest = iter(row.split([*map(len, parts[0])]))
        for name, (mine, *_) in sent.items():
            # a clone begins where its dtype may begin
            found = [next(rest).clone().view(X.dtype).view(X.shape) for X in tensors_of(mine)]
            received[name].append(found[0] if isinstance(mine, Tensor) else found)
    return received, rows.shape[1]


def look_at(X: Tensor | None) -> int:
    return MISSING if X is None else FINITE if X.isfinite().all() else NOT_FINITE


def tensors_of(sent: Any) -> list[Tensor]:
    return [sent] if isinstance(sent, Tensor) else [*sent]


def describe(sent: Any) -> str:
    if isinstance(sent, Tensor):
        return f"{tuple(sent.shape)} {sent.dtype} {sent.device.type}"
    return str([*map(describe, sent)]) if isinstance(sent, (list, tuple)) else repr(sent)


def to_bytes(X: Tensor) -> Tensor:
    return X.detach().reshape(-1).contiguous().view(torch.uint8)
