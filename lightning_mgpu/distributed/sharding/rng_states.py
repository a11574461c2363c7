"""States of the global random generators that have been put aside."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.utilities.seed import isolate_rng


class RNGStates:
    """The states that the generators of torch, NumPy and Python had when this was made."""

    def __init__(self, include_cuda: bool = False) -> None:
        self.states = _collect_rng_states(include_cuda)

    def restore(self) -> None:
        _set_rng_states(self.states)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Numbers that are drawn meanwhile move these states, and not the generators' own."""
        with isolate_rng(include_cuda=False):
            _set_rng_states(self.states)
            yield
            self.states |= _collect_rng_states(include_cuda=False)
