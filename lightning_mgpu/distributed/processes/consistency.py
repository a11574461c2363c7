"""Invariants: values that must be identical in all processes, verified in control messages."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np

DIVERGED = "processes have diverged"
INVARIANTS = {
    "seed": "the random state of process {process} differs from process {rank}. Call "
    "seed_everything() first, and draw the same random numbers in every process.",
    "batches": "process {process} loads different batches than process {rank}. Seed all processes "
    "equally, and do not split a dataset by rank.",
    "dataset": "the dataset of process {process} differs from process {rank}. Do not split it by "
    "rank, and seed the code that creates it.",
    "parameters": "process {process} and process {rank} differ in which parameters require a "
    "gradient, or in the shapes, dtypes or strides of these.",
    "plans": "an allreduce as written sends different messages in process {process} than in "
    "process {rank}. It must not depend on the rank, the time or set iteration order.",
    "names": "process {process} logs different values than process {rank}, which logs {names}. Log "
    "the same values in every batch.",
}
"""By name: the error message for a process with a different value."""


class ConsistencyCheck:
    """Packs invariants, with a payload, into the bytes of a control message, and verifies them.

    Args:
        rank: The rank of this process.
        messages: Error messages by name, such as `INVARIANTS`.
    """

    def __init__(self, rank: int, messages: dict[str, str]) -> None:
        self.rank, self.messages = rank, messages

    def pack(self, values: Mapping[str, int], payload: Any = ()) -> np.ndarray:
        """The bytes (n,) of a control message, from values by name. A missing value is 0."""
        assert values.keys() <= self.messages.keys()
        numbers = np.array([values.get(name, 0) for name in self.messages], np.int64)
        return np.concatenate([numbers.view(np.uint8), np.asarray(payload, np.uint8)])

    def verify(self, rows: np.ndarray, names: Any = ()) -> np.ndarray:
        """The payloads of all P processes, from the bytes (P, n) of their control messages.

        Raises:
            RuntimeError: If an invariant differs between processes.
        """
        invariants, payloads = np.split(rows, [8 * len(self.messages)], axis=1)
        numbers = np.ascontiguousarray(invariants).view(np.int64)
        for process, i in np.argwhere(numbers != numbers[self.rank]).tolist():
            message = [*self.messages.values()][i]
            reason = message.format(process=process, rank=self.rank, names=names)
            raise RuntimeError(f"{DIVERGED}: {reason}")
        return payloads


def crc_of(value: Any) -> int:
    """A checksum of a value whose `repr` is identical in all processes."""
    return crc32(repr(value).encode())
