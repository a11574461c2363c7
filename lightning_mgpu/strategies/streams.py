"""Random numbers of k replicas."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.strategies.devices_and_attributes import device_module


class Streams:
    """A stream of random numbers for each replica, seeded by the run's seed, the step, its number.

    `first` is the number of the first replica here. It draws from the global generators, as one
    device does, unless `all_seeded`.
    """

    def __init__(self, devices: Sequence[torch.device], first: int, all_seeded: bool) -> None:
        self.devices, self.first, self.all_seeded = devices, first, all_seeded
        self.begin()

    def begin(self, *number: int) -> None:
        """A step begins. The numbers say which one: step, epoch and batch."""
        self._number = number
        self._states: dict[int, list[Tensor]] = {}  # of generators, by replica

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw replica i's numbers inside the block; a step may enter it several times."""
        if i == 0 and not self.all_seeded:
            yield
            return
        device, module = self.devices[i], device_module(self.devices[i])
        sources = [torch] if module is None else [torch, module]  # a step draws on the CPU, too
        if i not in self._states:
            # of integers: the same in every process
            seed = hash((torch.initial_seed(), *self._number, self.first + i)) % 2**63
            places = [torch.device("cpu"), device][: len(sources)]
            self._states[i] = [
                torch.Generator(place).manual_seed(seed).get_state() for place in places
            ]
        outside = [source.get_rng_state() for source in sources]
        _set(sources, self._states[i])
        try:
            yield
            self._states[i] = [source.get_rng_state() for source in sources]
        finally:
            _set(sources, outside)


def _set(sources: Sequence[Any], states: Sequence[Tensor]) -> None:
    for source, state in zip(sources, states):
        source.set_rng_state(state)
