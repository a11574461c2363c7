"""Random numbers: every replica draws from a stream of its own, which the batch's number decides.

Nothing has to be saved: a run resumed with the same seed draws the same numbers at the same batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_mgpu.strategies.one_process import device_module


class Streams:
    """The random streams of k replicas. The first draws from the global generators, as one device, or has its own."""

    def __init__(self, devices: Sequence[torch.device], all_own: bool) -> None:
        self.devices, self.all_own = devices, all_own
        self.begin()

    def begin(self, *number: int) -> None:
        """A step begins. The numbers name it: its kind, epoch and batch."""
        self._number = number
        self._states: dict[int, list[Tensor]] = {}  # of generators, by replica

    @contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Draw replica i's numbers inside the block; a step may enter it several times."""
        if i == 0 and not self.all_own:
            yield
            return
        device = self.devices[i]
        before = _states(device)
        if i not in self._states:
            seed = hash((torch.initial_seed(), *self._number, i)) % 2**63  # of integers: the same in every process
            kinds = [torch.device("cpu"), device][: len(before)]
            self._states[i] = [torch.Generator(kind).manual_seed(seed).get_state() for kind in kinds]
        _set_states(device, self._states[i])
        try:
            yield
        finally:
            self._states[i] = _states(device)
            _set_states(device, before)


def _states(device: torch.device) -> list[Tensor]:
    """Of the generators that a step on a device draws from: the CPU's, and the device's own."""
    module = device_module(device)
    return [torch.get_rng_state()] if module is None else [torch.get_rng_state(), module.get_rng_state(device)]


def _set_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if (module := device_module(device)) is not None:
        module.set_rng_state(states[1], device)
