"""Random numbers of k replicas."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_mgpu.strategies.devices_and_attributes import device_module

NUMPY = SimpleNamespace(get_rng_state=np.random.get_state, set_rng_state=np.random.set_state)
PYTHON = SimpleNamespace(get_rng_state=random.getstate, set_rng_state=random.setstate)


class Streams:
    """A stream of random numbers for each replica, seeded by the run's seed, the step, its number.

    `first` is the number of the first replica here. It draws from the global generators, as one
    device does, unless `all_seeded`. Then numpy and Python have a stream for each replica, too.
    """

    def __init__(self, devices: Sequence[torch.device], first: int, all_seeded: bool) -> None:
        self.devices, self.first, self.all_seeded = devices, first, all_seeded
        self.begin()

    def begin(self, *number: int, meets: bool = False) -> None:
        """A step begins. The numbers say which one: step, epoch and batch."""
        self._number, self._meets = number, meets
        self._states: dict[int, list[Any]] = {}  # of generators, by replica

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw replica i's numbers inside the block; a step may enter it several times."""
        if i == 0 and not self.all_seeded:
            yield
            return
        device, module = self.devices[i], device_module(self.devices[i])
        sources = [torch] if module is None else [torch, module]  # a step draws on the CPU, too
        num_torch, is_first = len(sources), i not in self._states
        if self.all_seeded and (is_first or self._meets):  # not for a backward pass: 0.1 ms
            sources += [NUMPY, PYTHON]
        outside = [source.get_rng_state() for source in sources]
        if is_first:
            # of integers: the same in every process
            seed = hash((torch.initial_seed(), *self._number, self.first + i)) % 2**63
            places = [torch.device("cpu"), device][:num_torch]
            self._states[i] = [
                torch.Generator(place).manual_seed(seed).get_state() for place in places
            ]
            if self.all_seeded:
                np.random.seed(seed % 2**32)  # noqa: NPY002
                random.seed(seed)
        _set(sources, self._states[i])
        try:
            yield
            left = sources if self._meets else sources[:num_torch]
            self._states[i] = [source.get_rng_state() for source in left]
        finally:
            _set(sources, outside)


def _set(sources: Sequence[Any], states: Sequence[Any]) -> None:
    for source, state in zip(sources, states):
        source.set_rng_state(state)
