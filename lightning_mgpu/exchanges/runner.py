"""Runs the exchanges of all parameters together.

In a round, every exchange that is not over yields tensors. All of a replica's tensors travel in one
row of bytes, and every process gets the rows of all replicas.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, so that every part of a row can be viewed in its dtype


class State(dict):
    """An exchange keeps tensors and plain values in it, for a parameter, until the next step."""

    def __init__(self, name: str, replica: int, num_replicas: int) -> None:
        super().__init__()
        self.name, self.replica, self.num_replicas = name, replica, num_replicas


def run_exchanges(
    replicas: list[dict[str, Generator]],  # here, by the parameter's name
    inputs: dict[str, Tensor],  # like the X of each
    gather_rows: Callable[[Tensor], Tensor],  # from (r, n) bytes of the replicas here to (k, n)
    gather_numbers: Callable[[np.ndarray], np.ndarray],  # from r numbers to k
) -> tuple[dict[str, Tensor], int]:
    """Returns the results of the exchanges, by name, and the number of bytes that a replica sent.

    Raises:
        RuntimeError: If replicas send or return what does not fit together.
    """
    returned: list[dict[str, Tensor]] = [{} for _ in replicas]
    received: dict[str, Any] = {}
    gathered, version, num_bytes, where = torch.empty(0), 0, 0, "?"
    while any(replicas):
        messages: list[dict[str, Any]] = [{} for _ in replicas]
        for generators, message, results in zip(replicas, messages, returned):
            for name, generator in [*generators.items()]:
                try:
                    message[name] = generator.send(received.get(name))
                    where = f"{name}, line {line_of(generator)}"
                except StopIteration as end:
                    del generators[name]
                    results[name] = end.value
                if gathered._version != version:
                    raise RuntimeError(f"{where}: what is received belongs to all: clone it first")
        layouts = [str([(n, describe(X)) for n, X in tensors_of(each)]) for each in messages]
        checksums = gather_numbers(np.array([crc32(layout.encode()) for layout in layouts]))
        for replica in np.flatnonzero(checksums != checksums[0]):
            raise RuntimeError(f"{where}: replica {replica} does not send what replica 0 sends")
        if messages[0]:
            gathered = gather_rows(torch.stack([pack(message) for message in messages]))
            version, received = gathered._version, unpack(gathered, messages[0])
            num_bytes += sum(X.nbytes for _, X in tensors_of(messages[0]))
    for name, X in inputs.items():
        found = [describe(each[name]) for each in returned]
        if any(each != describe(X) for each in found):
            raise RuntimeError(f"{name}: {found[0]} is returned; needed is {describe(X)}, like X")
        if not all(same_bits(each[name], returned[0][name]) for each in returned):
            raise RuntimeError(f"{name}: what is returned differs between replicas")
    return returned[0], num_bytes


def line_of(generator: Any) -> int:
    """Where a generator waits, or the one that it delegates to."""
    while isinstance(generator.gi_yieldfrom, Generator):
        generator = generator.gi_yieldfrom
    return generator.gi_frame.f_lineno


def tensors_of(message: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, sent in message.items():
        for tensor in [sent] if isinstance(sent, Tensor) else sent:
            yield name, tensor


def describe(X: Any) -> Any:
    return (tuple(X.shape), X.dtype, X.device.type) if isinstance(X, Tensor) else X


def pack(message: dict[str, Any]) -> Tensor:
    """All tensors of a message in one row of bytes."""
    rows = [to_bytes(X) for _, X in tensors_of(message)]
    return torch.cat([part for row in rows for part in (row, row.new_zeros(padding(row)))])


def unpack(rows: Tensor, message: dict[str, Any]) -> dict[str, list[Any]]:
    """Views of the rows (k, n): for each name, what each replica has yielded."""
    received: dict[str, list[Any]] = {name: [[] for _ in rows] for name in message}
    start = 0
    for name, X in tensors_of(message):
        for row, views in zip(rows, received[name]):
            views.append(row[start : start + X.nbytes].view(X.dtype).view(X.shape))
        start += X.nbytes + padding(X)
    is_single = {name for name, sent in message.items() if isinstance(sent, Tensor)}
    return {n: [x for (x,) in each] if n in is_single else each for n, each in received.items()}


def padding(X: Tensor) -> int:
    return -X.nbytes % ALIGNMENT


def to_bytes(X: Tensor) -> Tensor:
    return X.detach().reshape(-1).contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(to_bytes(a), to_bytes(b))
