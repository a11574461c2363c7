"""Runs the generators of an exchange side by side, one per parameter and replica.

In each round, every unfinished generator yields tensors. The tensors of a replica are packed into
one buffer of bytes, and the buffers of all replicas are all-gathered. Replicas agree on shapes and
dtypes of each round in a bucket's first update (`RoundLayout`), and may not change them later.
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
    """A dict for tensors and plain values that an exchange keeps between steps, per parameter."""

    def __init__(
        self, name: str, replica: int, num_replicas: int, data: dict[str, Any], seed: int = 0
    ) -> None:
        self.name, self.replica, self.num_replicas, self.data = name, replica, num_replicas, data
        self.seed = seed  # of the run: identical in all replicas, and after a resume


class RoundLayout:
    """A description of what one replica sends in each round, by parameter.

    Args:
        control: The control plane, for comparing layouts between processes in the first update.
            None: all replicas are in this process.
    """

    def __init__(self, control: Any = None) -> None:
        self.control, self.rounds, self.is_complete = control, list[dict[str, str]](), False

    def check(self, number: int, sent: list[dict[str, Any]], running: Any) -> None:
        """Raise a RuntimeError if a local replica does not send what the layout describes."""
        layouts = [{name: describe(x) for name, x in xs.items()} for xs in sent]
        if not self.is_complete:
            self._compare(layouts, running)
            self.rounds.append(layouts[0])
        planned = self.rounds[number] if number < len(self.rounds) else {}
        for name, found in [item for layout in layouts for item in layout.items()]:
            if found != planned.get(name):
                raise RuntimeError(
                    f"{name}: an exchange sends {found}, but {planned.get(name)} in its first "
                    "step: pad to constant shapes."
                )

    def _compare(self, layouts: list[dict[str, str]], running: dict[str, list[Any]]) -> None:
        """Verify that all replicas send identical layouts in the first update."""
        rows = np.array([[checksum(text) for text in layout.values()] for layout in layouts])
        if self.control is not None:
            rows = self.control.all_gather(rows.reshape(-1), "an exchange")
        rows = rows.reshape(-1, len(running))
        if not (rows != rows[0]).any():
            return
        if self.control is not None:
            layouts = self.control.all_gather_objects(layouts[0], "shapes of an exchange")
        for replica, i in np.argwhere(rows != rows[0]).tolist():
            name, waiting = [*running.items()][i]
            lines = [g.gi_yieldfrom.gi_frame.f_lineno for g in waiting if g.gi_yieldfrom]
            raise RuntimeError(
                f"{name}, waiting in line {lines}: replica {replica} sends "
                f"{layouts[replica][name]}, but replica 0 sends {layouts[0][name]}"
            )


def exact(X: Tensor, state: Any) -> Exchange:
    """The book's allreduce, from one replica's side: send the whole tensor."""
    return sum((yield X))


def run_exchanges(
    exchange: Any,
    replicas: list[dict[str, Tensor]],  # X per local replica: may be changed in place
    states: list[dict[str, State]],  # per local replica
    num_processes: int,
    layout: RoundLayout,
) -> Generator[Message, Any, tuple[list[Tensor], int]]:
    """Yield the bytes of the local replicas, and receive the bytes of all replicas.

    Returns a result per X (an exchange may still use its memory), and the bytes sent per replica.

    Raises:
        RuntimeError: If the tensors that replicas send or return do not match.
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
        by_name = {name: [g.send(received[name]) for g in running[name]] for name in running}
        sent = [{name: xs[i] for name, xs in by_name.items()} for i in range(len(replicas))]
        layout.check(number, sent, running)
        if not any(tensors_of(x) for x in sent[0].values()):
            break
        rows = [[to_bytes(X) for x in xs.values() for X in tensors_of(x)] for xs in sent]
        row = torch.cat([part for parts in rows for part in parts])
        everything = yield Message(row, None, [len(row)] * num_processes)
        num_bytes_here = len(row) // len(sent)
        received = unpack(sent[0], [*everything.view(-1, num_bytes_here)])
        num_bytes += num_bytes_here
    layout.is_complete = True
    return take_results(planned, results), num_bytes


def run_here(route: Any) -> tuple[list[Tensor], int]:
    """Run exchanges whose replicas are all in this process."""
    received: Any = None
    try:
        while True:
            received = route.send(received).sent
    except StopIteration as end:
        return end.value


def endless(generator: Exchange, results: list[Any]) -> Generator[Any, Any, Any]:
    """Run an exchange, then send nothing until the others have finished."""
    if not isinstance(generator, Generator):
        raise TypeError("an exchange must be a generator: use `yield`")
    results.append((yield from generator))
    while True:
        yield ()


# all local replicas share the tensors: in this mode, changing them in place is an error
@torch.inference_mode()
def unpack(sent: dict[str, Any], rows: list[Tensor]) -> dict[str, list[Any]]:
    """Unpack the tensors of all replicas, by name, from their bytes (k, bytes)."""
    sizes = [X.nbytes for x in sent.values() for X in tensors_of(x)]
    received: dict[str, list[Any]] = {name: [] for name in sent}
    for row in rows:
        rest = iter(row.split(sizes))
        for name, x in sent.items():
            # a clone is aligned for its dtype, and an exchange may keep it
            found = [next(rest).clone().view(X.dtype).view(X.shape) for X in tensors_of(x)]
            received[name].append(found[0] if isinstance(x, Tensor) else found)
    return received


def take_results(planned: dict[str, str], results: dict[str, Any]) -> list[Tensor]:
    found = []
    for name, (first, *others) in results.items():
        if (returned := describe(first)) != planned[name]:
            raise RuntimeError(f"{name}: returned {returned}, but X is {planned[name]}")
        if not all(torch.equal(to_bytes(X), to_bytes(first)) for X in others):
            raise RuntimeError(f"{name}: results differ between replicas")
        found.append(first)
    return found


def tensors_of(sent: Any) -> list[Tensor]:
    return [sent] if isinstance(sent, Tensor) else [*sent]


def describe(sent: Any) -> str:
    if isinstance(sent, Tensor):
        return f"shape {tuple(sent.shape)} ({sent.dtype}, {sent.device.type})"
    return str([*map(describe, sent)]) if isinstance(sent, (list, tuple)) else repr(sent)
