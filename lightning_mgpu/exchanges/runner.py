"""Runs the exchanges of all parameters together.

In a round, every exchange that is not over yields tensors. All of a replica's tensors travel in one
row of bytes, and every process gets the rows of all replicas, by one message. The layouts of all
rounds are learned in the first step: the *plan*. A row goes in the planned length, beside a
checksum of its layout, so that a round of another layout is noticed by all, and sent again.
"""

from collections import UserDict
from collections.abc import Callable, Generator, Mapping
from copy import deepcopy
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mgpu.shards.checksum import checksum

Exchange = Generator[Any, Any, Any]
Rows = Generator[tuple[Tensor, str], Tensor, Any]
BUFFERS = "buffers"  # beside the names of parameters: a module cannot have one of this name
HEAD = 8  # bytes of a checksum before a row


class Layout(NamedTuple):
    """Of the tensors that one replica sends in a round: a checksum, and a number of bytes."""

    checksum: int
    num_bytes: int


class Outcome(NamedTuple):
    """Results of the exchanges in a step."""

    results: dict[str, Tensor]  # by parameter, in memory laid out like it
    states: dict[int, dict[Any, Any]]  # of each replica here; a key begins with a name
    buffers: Tensor | None  # of all replicas (k, bytes)
    num_bytes: int  # that a replica has sent, without buffers


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
    states: Mapping[int, dict[Any, Any]],  # of the same replicas, by number: they are not changed
    num_replicas: int,  # k
    plan: list[Layout],  # of every round
    buffers: list[Tensor] | None = None,  # of each replica here: they travel in the first round
) -> Generator[tuple[Tensor, str], Tensor, Outcome]:
    """Yields rows (r, n) of the replicas here, with a purpose if processes may be elsewhere.

    It gets the rows (k, n) of all replicas. For an X that is missing, and for numbers that are not
    finite, an exchange gets zeros: its result and its state are not to be used then.

    Raises:
        RuntimeError: If replicas send or return what does not fit together.
    """
    running: dict[str, list[Any]] = {}
    results: dict[str, list[Any]] = {}
    after: dict[int, dict[Any, Any]] = {replica: {} for replica in states}
    for name, p in parameters.items():
        running[name], results[name] = [], []
        key = (name, tuple(p.shape), str(p.dtype))  # a layer may be replaced by another
        for (replica, kept), tensors in zip(states.items(), replicas):
            data = after[replica][key] = deepcopy(kept.get(key, {}))
            X = torch.nan_to_num(tensors[p], 0, 0, 0) if p in tensors else torch.zeros_like(p)
            generator = exchange(X.contiguous(), State(name, replica, num_replicas, data))
            running[name].append(endless(generator, results[name]))
    if buffers:
        results[BUFFERS] = []
        running[BUFFERS] = [endless(take_all(each), results[BUFFERS]) for each in buffers]
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    received: dict[str, Any] = dict.fromkeys(running)
    num_bytes = 0
    for number in count():
        sent = {name: [each.send(received[name]) for each in running[name]] for name in running}
        is_over = not any(tensors_of(x) for xs in sent.values() for x in xs)
        if is_over and number == len(plan):
            break  # a replica that goes on finds the others at the place of their next step
        planned = plan[number : number + 1]
        rows = yield from trade(sent, running, plan, number, device)
        if planned and planned != plan[number : number + 1]:  # sent in vain
            num_bytes += planned[0].num_bytes
        if rows is None:
            break
        received = unpack(sent, rows)
        num_bytes += rows.shape[1]
    all_buffers = results.pop(BUFFERS)[0] if buffers else None
    num_bytes -= len(buffers[0]) if buffers else 0
    return Outcome(take_results(parameters, results), after, all_buffers, num_bytes)


def drive(
    run: Any, gather: Callable[[Tensor, str], Tensor] = lambda rows, _: rows, rows: Any = None
) -> Outcome:
    """Carry the rows of `run_exchanges`, which gets `rows` first. By default, all are here."""
    try:
        while True:
            rows = gather(*run.send(rows))
    except StopIteration as end:
        return end.value


def endless(generator: Exchange, results: list[Any]) -> Generator[Any, Any, Any]:
    """Once an exchange is over, it sends nothing in the rounds of the others."""
    if not isinstance(generator, Generator):
        raise TypeError("an exchange is a generator: it needs a `yield`")
    results.append((yield from generator))
    while True:
        yield ()


def take_all(X: Tensor) -> Exchange:
    return torch.stack((yield X))


def trade(
    sent: dict[str, list[Any]], running: Any, plan: list[Layout], number: int, device: torch.device
) -> Rows:
    """Returns the rows of all replicas in a round (k, bytes), or None if all exchanges are over."""
    by_replica = [*zip(*sent.values())]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    rows = [
        torch.cat([nothing, *(to_bytes(X) for x in xs for X in tensors_of(x))]) for xs in by_replica
    ]
    layouts = [
        Layout(checksum([*map(describe, xs)]), len(row)) for xs, row in zip(by_replica, rows)
    ]
    planned = plan[number] if number < len(plan) else None
    heads = torch.tensor([[each.checksum] for each in layouts], device=device)
    if planned is None:
        heads = yield heads, "an exchange"
    else:
        fits = all(layout == planned for layout in layouts)
        body = torch.stack(rows) if fits else heads.new_zeros(len(rows), planned.num_bytes).byte()
        gathered = yield torch.cat([heads.view(torch.uint8), body], dim=1), ""
        heads, body = gathered[:, :HEAD].contiguous().view(torch.int64), gathered[:, HEAD:]
        if (heads == planned.checksum).all():
            return body
    if (heads != layouts[0].checksum).any():
        yield from refuse_unequal(by_replica, running)
    plan[number : number + 1] = [layouts[0]] if layouts[0].num_bytes else []
    if not layouts[0].num_bytes:
        del plan[number:]
        return None
    return (yield torch.stack(rows), "")


def refuse_unequal(by_replica: list[Any], running: dict[str, list[Any]]) -> Rows:
    """Find out which parameter is sent in different layouts, and where its exchange waits."""
    layouts = [[checksum(describe(x)) for x in xs] for xs in by_replica]
    checksums = yield torch.tensor(layouts), "an exchange"
    for replica, i in (checksums != checksums[0]).nonzero().tolist():
        name, waiting = [*running.items()][i]
        lines = [each.gi_yieldfrom.gi_frame.f_lineno for each in waiting if each.gi_yieldfrom]
        where = f"{name}, waiting in line {lines}"
        raise RuntimeError(f"{where}: replica {replica} does not send what replica 0 sends")


# in this mode, torch refuses to change new tensors in place: they belong to all replicas here
@torch.inference_mode()
def unpack(sent: dict[str, list[Any]], rows: Tensor) -> dict[str, list[Any]]:
    """What all replicas have yielded, by name, from their rows (k, bytes)."""
    sizes = [X.nbytes for mine, *_ in sent.values() for X in tensors_of(mine)]
    received: dict[str, list[Any]] = {name: [] for name in sent}
    for row in rows:
        rest = iter(row.split(sizes))
        for name, (mine, *_) in sent.items():
            # a clone begins where its dtype may begin
            found = [next(rest).clone().view(X.dtype).view(X.shape) for X in tensors_of(mine)]
            received[name].append(found[0] if isinstance(mine, Tensor) else found)
    return received


def take_results(parameters: dict[str, Tensor], results: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, (first, *others) in results.items():
        p = parameters[name]
        if describe(first) != describe(p):
            raise RuntimeError(f"{name}: for X of {describe(p)} it returned {describe(first)}")
        if not all(torch.equal(to_bytes(each), to_bytes(first)) for each in others):
            raise RuntimeError(f"{name}: what is returned differs between replicas")
        found[name] = torch.empty_like(p).copy_(first)
    return found


def tensors_of(sent: Any) -> list[Tensor]:
    return [sent] if isinstance(sent, Tensor) else [*sent]


def describe(sent: Any) -> str:
    if isinstance(sent, Tensor):
        return f"shape {tuple(sent.shape)} ({sent.dtype}, {sent.device.type})"
    return str([*map(describe, sent)]) if isinstance(sent, (list, tuple)) else repr(sent)


def to_bytes(X: Tensor) -> Tensor:
    return X.detach().reshape(-1).contiguous().view(torch.uint8)
