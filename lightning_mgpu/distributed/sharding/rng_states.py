"""Saved states of the global random number generators (RNGs)."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities.seed import isolate_rng


class RNGStates:
    """The states of the RNGs of torch, NumPy and Python at the time of creation."""

    def __init__(self, include_cuda: bool = False) -> None:
        self.states = _collect_rng_states(include_cuda)

    def restore(self) -> None:
        _set_rng_states(self.states)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which random numbers advance these states, not the global RNGs."""
        with isolate_rng(include_cuda=False):
            _set_rng_states(self.states)
            yield
            self.states |= _collect_rng_states(include_cuda=False)
