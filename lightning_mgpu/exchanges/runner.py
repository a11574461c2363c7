"""Runs the exchanges of all parameters together.

In a round, every exchange that is not over yields tensors. All of a replica's tensors travel in one
row of bytes, and every process gets the rows of all replicas, by one message. The layouts of all
rounds are learned in the first step: the *plan*. A row goes in the planned length, beside a
checksum of its layout, so that a round of another layout is noticed by all, and sent again.
"""

from collections import UserDict
from collections.abc import Callable, Generator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.shards.checksum import checksum

Exchange = Generator[Any, Any, Any]
HEAD = 8  # bytes of a checksum before a row
MISSING, FINITE, NOT_FINITE = 0, 1, 2  # what a replica has of a parameter
Gather = Callable[[Tensor], Tensor]  # from the rows (r, n) of the replicas here to (k, n)


class Layout(NamedTuple):
    """Of the tensors that one replica sends in a round: a checksum, and a number of bytes."""

    checksum: int
    num_bytes: int


class Early(NamedTuple):
    """A first round on its way, while only this process's looks are known, not those of all."""

    running: dict[str, list[Any]]
    results: dict[str, list[Any]]
    sent: dict[str, list[Any]]
    receive: Callable[[], Tensor]  # the rows of all replicas
    states: dict[int, Any]  # as they were before it


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
    looks: Tensor | None = None,  # (k, parameters): of all replicas, from `look_at_all`
    meet: Gather = Tensor.detach,  # of short rows, where processes may be at different places
    send: Gather = Tensor.detach,
    plans: dict[Any, list[Layout]] | None = None,  # of every round, for the looks of a step
    early: Early | None = None,  # its first round, if the looks are those of the step before
) -> tuple[dict[Tensor, Tensor], int]:
    """Returns the results, in memory laid out like the parameters, and a replica's bytes sent.

    Raises:
        RuntimeError: If replicas send or return what does not fit together.
    """
    gathered = look_at_all(parameters, replicas) if looks is None else looks
    look_of = dict(zip(parameters, gathered.amax(0).tolist()))
    if early is None:
        running, results = start(exchange, parameters, look_of, replicas, states, len(gathered))
    else:
        running, results = early.running, early.results
    plan = [] if plans is None else plans.setdefault(tuple(look_of.values()), [])
    received: dict[str, Any] = dict.fromkeys(running)
    num_bytes = 0
    for number in count():
        first = early if number == 0 else None
        sent = advance(running, received) if first is None else first.sent
        is_over = not any(tensors_of(x) for xs in sent.values() for x in xs)
        if is_over and number == len(plan):
            break  # a replica that goes on finds the others at the place of their next step
        rows = trade(sent, running, plan, number, meet, send, first and first.receive)
        if rows is None:
            break
        received = unpack(sent, rows)
        num_bytes += rows.shape[1]
    return take_results(parameters, results), num_bytes


def look_at_all(parameters: dict[str, Tensor], replicas: list[dict[Tensor, Tensor]]) -> Tensor:
    """What each replica here has of each parameter, (r, parameters)."""
    looks = [[look_at(each.get(p)) for p in parameters.values()] for each in replicas]
    return torch.tensor(looks, dtype=torch.uint8)


def start(
    exchange: Any,
    parameters: dict[str, Tensor],
    look_of: dict[str, int],
    replicas: list[dict[Tensor, Tensor]],
    states: Mapping[int, dict[Any, Any]],
    num_replicas: int,
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The generators of the replicas here, by parameter, and lists that will have their results."""
    running: dict[str, list[Any]] = {}
    results: dict[str, list[Any]] = {}
    for name, p in parameters.items():
        if look_of[name] == MISSING:
            continue
        running[name], results[name] = [], []
        for (replica, kept), tensors in zip(states.items(), replicas):
            X = tensors[p] if p in tensors else torch.zeros_like(p)
            X = X.clone(memory_format=torch.contiguous_format)
            if look_of[name] == NOT_FINITE or not p.numel():  # all see it, and no state keeps it
                generator = exact(X, {})
            else:
                data = kept.setdefault((name, tuple(p.shape), str(p.dtype)), {})
                generator = exchange(X, State(name, replica, num_replicas, data))
            running[name].append(endless(generator, results[name]))
    return running, results


def endless(generator: Exchange, results: list[Any]) -> Generator[Any, Any, Any]:
    """Once an exchange is over, it sends nothing in the rounds of the others."""
    if not isinstance(generator, Generator):
        raise TypeError("an exchange is a generator: it needs a `yield`")
    results.append((yield from generator))
    while True:
        yield ()


def start_early(
    exchange: Any,
    parameters: dict[str, Tensor],
    replicas: list[dict[Tensor, Tensor]],
    states: Mapping[int, dict[Any, Any]],
    last: Tensor,  # the looks (k, parameters) of the step before
    plan: list[Layout],  # for these looks
    begin: Callable[[Tensor], Callable[[], Tensor]],  # sends rows, and does not wait for others
) -> Early:
    """Send a first round as if every process saw what it saw in the step before."""
    before = apply_to_collection(dict(states), Tensor, Tensor.clone)
    expected = dict(zip(parameters, last.amax(0).tolist()))
    running, results = start(exchange, parameters, expected, replicas, states, len(last))
    sent = advance(running, dict.fromkeys(running))
    return Early(running, results, sent, begin(pack(*lay_out(sent), plan[0])), before)


def advance(running: dict[str, list[Any]], received: dict[str, Any]) -> dict[str, list[Any]]:
    """Give exchanges what they have received; returns what they send next, for each replica."""
    return {name: [each.send(received[name]) for each in running[name]] for name in running}


def lay_out(sent: dict[str, list[Any]]) -> tuple[list[Layout], list[Tensor]]:
    """A row (bytes) for each replica here, of all that it sends, and how it is laid out."""
    by_replica = [*zip(*sent.values())]
    rows = [
        torch.cat([to_bytes(X) for x in xs for X in tensors_of(x)] or [torch.empty(0).byte()])
        for xs in by_replica
    ]
    layouts = [
        Layout(checksum([*map(describe, xs)]), len(row)) for xs, row in zip(by_replica, rows)
    ]
    return layouts, rows


def pack(layouts: list[Layout], rows: list[Tensor], planned: Layout) -> Tensor:
    """Rows of the planned length, or zeros, each behind the checksum of its layout."""
    heads = torch.tensor([layout.checksum for layout in layouts], device=rows[0].device)[:, None]
    fits = all(layout == planned for layout in layouts)
    body = torch.stack(rows) if fits else heads.new_zeros(len(rows), planned.num_bytes).byte()
    return torch.cat([heads.view(torch.uint8), body], dim=1)


def trade(
    sent: dict[str, list[Any]],
    running: dict[str, list[Any]],
    plan: list[Layout],
    number: int,
    meet: Gather,
    send: Gather,
    receive: Callable[[], Tensor] | None,  # if the planned message is on its way
) -> Tensor | None:
    """The rows of all replicas in a round (k, bytes), or None if all exchanges are over."""
    layouts, rows = lay_out(sent)
    planned = plan[number] if number < len(plan) else None
    if planned is None:
        heads = meet(torch.tensor([[each.checksum] for each in layouts], device=rows[0].device))
    else:
        gathered = receive() if receive else send(pack(layouts, rows, planned))
        heads, body = gathered[:, :HEAD].contiguous().view(torch.int64), gathered[:, HEAD:]
        if (heads == planned.checksum).all():
            return body
    if (heads != layouts[0].checksum).any():
        refuse_unequal([*zip(*sent.values())], running, meet)
    plan[number : number + 1] = [layouts[0]] if layouts[0].num_bytes else []
    if not layouts[0].num_bytes:
        del plan[number:]
        return None
    return send(torch.stack(rows))


def refuse_unequal(by_replica: list[Any], running: dict[str, list[Any]], meet: Gather) -> None:
    """Find out which parameter is sent in different layouts, and where its exchange waits."""
    layouts = [[checksum(describe(x)) for x in xs] for xs in by_replica]
    checksums = meet(torch.tensor(layouts))
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


def take_results(parameters: dict[str, Tensor], results: dict[str, Any]) -> dict[Tensor, Tensor]:
    found = {}
    for name, (first, *others) in results.items():
        p = parameters[name]
        if describe(first) != describe(p):
            raise RuntimeError(f"{name}: for X of {describe(p)} it returned {describe(first)}")
        if not all(torch.equal(to_bytes(each), to_bytes(first)) for each in others):
            raise RuntimeError(f"{name}: what is returned differs between replicas")
        found[p] = torch.empty_like(p).copy_(first)
    return found


def look_at(X: Tensor | None) -> int:
    return MISSING if X is None else FINITE if X.isfinite().all() else NOT_FINITE


def tensors_of(sent: Any) -> list[Tensor]:
    return [sent] if isinstance(sent, Tensor) else [*sent]


def describe(sent: Any) -> str:
    if isinstance(sent, Tensor):
        return f"shape {tuple(sent.shape)} ({sent.dtype}, {sent.device.type})"
    return str([*map(describe, sent)]) if isinstance(sent, (list, tuple)) else repr(sent)


def to_bytes(X: Tensor) -> Tensor:
    return X.detach().reshape(-1).contiguous().view(torch.uint8)
