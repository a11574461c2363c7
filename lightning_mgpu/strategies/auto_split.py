"""`split='auto'`: shares of the batch in proportion to the replicas' speeds."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mgpu.strategies.devices_and_attributes import wait_for

NUM_TIMED = 5  # steps


class AutoSplit:
    """Times the replicas in the first steps, and turns the times into shares of the batch."""

    def __init__(self, is_asked: bool = True) -> None:
        self.is_done = not is_asked
        self._seconds: dict[int, float] = defaultdict(float)  # by replica
        self._steps = 0

    @contextmanager
    def timed(self, i: int, device: torch.device) -> Iterator[None]:
        """Add the time of the block to replica i's, until its device is through."""
        start = time.perf_counter()
        yield
        if self.is_done:
            return
        wait_for(device)
        self._seconds[i] += time.perf_counter() - start

    def end_step(self, shares: Sequence[float]) -> list[float]:
        """A step is over: the shares of the next one."""
        self._steps += 1
        if self._steps == 1:  # it warms up
            self._seconds.clear()
        has_few_samples = len(self._seconds) < len(shares)  # not every replica had some
        if self.is_done or self._steps <= NUM_TIMED or has_few_samples:
            return list(shares)
        self.is_done = True
        speeds = [share / self._seconds[i] for i, share in enumerate(shares)]
        split = [speed / sum(speeds) for speed in speeds]
        rank_zero_info(f"split='auto': shares of the batch {[round(share, 3) for share in split]}")
        return split
