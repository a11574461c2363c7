"""The route of an exchange: its generators side by side, one per parameter and replica.

In a round, every generator that is not over yields tensors. All tensors of a replica travel in one
row of bytes, and every process gets the rows of all replicas, by one message. Replicas agree on the
tensors of each round in a bucket's first update (`RoundLayout`), and may not change them later.
"""

from collections import UserDict
from collections.abc import Generator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.distributed.comm.schedules import Message
from lightning_mgpu.distributed.sharding.checksum import checksum, to_bytes

Exchange = Generator[Any, Any, Any]


class State(UserDict):
    """A dict in which an exchange keeps tensors and plain values of a parameter between steps."""

    def __init__(
        self, name: str, replica: int, num_replicas: int, data: dict[str, Any], seed: int = 0
    ) -> None:
        self.name, self.replica, self.num_replicas, self.data = name, replica, num_replicas, data
        self.seed = seed  # of the fit: the same in all replicas, and after a resume


class RoundLayout:
    """A description of what one replica sends in each round, by parameter.

    Args:
        control: The control plane, by which processes compare what they send in the first update.
            None: all replicas are in this process.
    """

    def __init__(self, control: Any = None) -> None:
        self.control, self.rounds, self.is_complete = control, list[dict[str, str]](), False

    def check(self, number: int, sent: list[dict[str, Any]], running: Any) -> None:
        """Raise a RuntimeError if a replica here does not send what the layout says."""
        layouts = [{name: describe(x) for name, x in each.items()} for each in sent]
        if not self.is_complete:
            self._compare(layouts, running)
            self.rounds.append(layouts[0])
        planned = self.rounds[number] if number < len(self.rounds) else {}
        for name, what in [item for each in layouts for item in each.items()]:
            if what != planned.get(name):
                raise RuntimeError(
                    f"{name}: an exchange sends {what} in place of {planned.get(name)}, other "
                    "shapes than in its first step: pad them."
                )

    def _compare(self, layouts: list[dict[str, str]], running: dict[str, list[Any]]) -> None:
        """All replicas must send the same in the first update."""
        rows = np.array([[checksum(what) for what in each.values()] for each in layouts])
        if self.control is not None:
            rows = self.control.all_gather(rows.reshape(-1), "an exchange")
        rows = rows.reshape(-1, len(running))
        if not (rows != rows[0]).any():
            return
        if self.control is not None:
            layouts = self.control.all_gather_objects(layouts[0], "shapes of an exchange")
        for replica, i in np.argwhere(rows != rows[0]).tolist():
            name, waiting = [*running.items()][i]
            lines = [each.gi_yieldfrom.gi_frame.f_lineno for each in waiting if each.gi_yieldfrom]
            raise RuntimeError(
                f"{name}, waiting in line {lines}: replica {replica} sends "
                f"{layouts[replica][name]}, but replica 0 sends {layouts[0][name]}"
            )


def exact(X: Tensor, state: Any) -> Exchange:
    """The book's allreduce, as one replica sees it: it sends the whole tensor."""
    return sum((yield X))


def run_exchanges(
    exchange: Any,
    replicas: list[dict[str, Tensor]],  # the X of each replica here: it may be changed
    states: list[dict[str, State]],  # of the same replicas
    num_processes: int,
    layout: RoundLayout,
) -> Generator[Message, Any, tuple[list[Tensor], int]]:
    """Yields the rows of the replicas here, and gets those of all.

    Returns a result for each X, whose memory an exchange may still use, and the bytes that a
    replica has sent.

    Raises:
        RuntimeError: If replicas send or return what does not fit together.
    """
    planned = {name: describe(X) for name, X in replicas[0].items()}
    results: dict[str, list[Any]] = {name: [] for name in planned}
    running = {
        name: [
            endless(exchange(Xs[name], own[name]), results[name])
            for Xs, own in zip(replicas, states)
        ]
        for name in planned
    }
    received: dict[str, Any] = dict.fromkeys(planned)
    num_bytes = 0
    for number in count():
        by_name = {name: [each.send(received[name]) for each in running[name]] for name in running}
        sent = [{name: xs[i] for name, xs in by_name.items()} for i in range(len(replicas))]
        layout.check(number, sent, running)
        if not any(tensors_of(x) for x in sent[0].values()):
            break
        rows = [[to_bytes(X) for x in each.values() for X in tensors_of(x)] for each in sent]
        row = torch.cat([part for each in rows for part in each])
        everything = yield Message(row, None, [len(row)] * num_processes)
        num_bytes_here = len(row) // len(sent)
        received = unpack(sent[0], [*everything.view(-1, num_bytes_here)])
        num_bytes += num_bytes_here
    layout.is_complete = True
    return take_results(planned, results), num_bytes


def run_here(route: Any) -> tuple[list[Tensor], int]:
    """Run a route whose replicas are all in this process."""
    received: Any = None
    try:
        while True:
            received = route.send(received).sent
    except StopIteration as end:
        return end.value


def endless(generator: Exchange, results: list[Any]) -> Generator[Any, Any, Any]:
    """Once an exchange is over, it sends nothing in the rounds of the others."""
    if not isinstance(generator, Generator):
        raise TypeError("an exchange is a generator: it needs a `yield`")
    results.append((yield from generator))
    while True:
        yield ()


# in this mode, torch refuses to change new tensors in place: they belong to all replicas here
@torch.inference_mode()
def unpack(sent: dict[str, Any], rows: list[Tensor]) -> dict[str, list[Any]]:
    """What all replicas have yielded, by name, from their rows (k, bytes)."""
    sizes = [X.nbytes for x in sent.values() for X in tensors_of(x)]
    received: dict[str, list[Any]] = {name: [] for name in sent}
    for row in rows:
        rest = iter(row.split(sizes))
        for name, x in sent.items():
            # a clone begins where its dtype may begin, and an exchange may keep it
            found = [next(rest).clone().view(X.dtype).view(X.shape) for X in tensors_of(x)]
            received[name].append(found[0] if isinstance(x, Tensor) else found)
    return received


def take_results(planned: dict[str, str], results: dict[str, Any]) -> list[Tensor]:
    found = []
    for name, (first, *others) in results.items():
        if (what := describe(first)) != planned[name]:
            raise RuntimeError(f"{name}: for X of {planned[name]} it returned {what}")
        if not all(torch.equal(to_bytes(each), to_bytes(first)) for each in others):
            raise RuntimeError(f"{name}: what is returned differs between replicas")
        found.append(first)
    return found


def tensors_of(sent: Any) -> list[Tensor]:
    return [sent] if isinstance(sent, Tensor) else [*sent]


def describe(sent: Any) -> str:
    if isinstance(sent, Tensor):
        return f"shape {tuple(sent.shape)} ({sent.dtype}, {sent.device.type})"
    return str([*map(describe, sent)]) if isinstance(sent, (list, tuple)) else repr(sent)
