"""States of the random generators a replica draws from: taken, compared, put back."""

import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.random import set_rng_state

from lightning_mgpu.strategies.threads.device_module import device_module

Streams = list[list[Tensor]]
"""Generator states of every replica: the CPU's, and its device's if that is another."""


def generator_states(device: torch.device) -> list[Tensor]:
    """States of the generators a replica on `device` draws from: the CPU's and, on a GPU, the device's."""
    module = device_module(device)
    return [torch.get_rng_state()] + ([module.get_rng_state(device)] if module is not None else [])


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether generator states are the same; `torch.equal` takes 15 times as long for a CPU's."""
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(first, second))


def new_generator_states(device: torch.device, seed: int) -> list[Tensor]:
    """The states those generators would have after `torch.manual_seed(seed)`, which is not called."""
    kinds = [torch.device("cpu")] + ([device] if device_module(device) is not None else [])
    return [torch.Generator(kind).manual_seed(seed).get_state() for kind in kinds]


@contextlib.contextmanager
def same_generator_states(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave the block with the generator states it was entered with, also numpy's and Python's.

    `watch_forks` does not see it.
    """
    before = [(device, generator_states(device)) for device in devices]
    others = np.random.get_state(), random.getstate()  # noqa: NPY002 (the global one's)
    try:
        yield
    finally:
        for device, states in before:
            set_generator_states(device, states)
        np.random.set_state(others[0])  # noqa: NPY002
        random.setstate(others[1])


@contextlib.contextmanager
def watch_forks() -> Iterator[list[bool]]:
    """A list that is no longer empty when a step in the block has put a generator's state back: `fork_rng`, say.

    Such a step draws random numbers, but leaves no trace of it.
    """
    seen: list[bool] = []

    def note(new_state: Tensor) -> None:
        seen.append(True)
        set_rng_state(new_state)

    torch.random.set_rng_state = torch.set_rng_state = note
    try:
        yield seen
    finally:
        torch.random.set_rng_state = torch.set_rng_state = set_rng_state


def set_generator_states(device: torch.device, states: list[Tensor]) -> None:
    set_rng_state(states[0])
    if (module := device_module(device)) is not None:
        module.set_rng_state(states[1], device)
