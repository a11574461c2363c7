"""`split='auto'`: each device gets work in proportion to its speed (the book's exercise on CPU and GPU together)."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mgpu.strategies.threads.device_module import device_module


class AutoSplit:
    """Times the replicas in the first steps, and turns the times into shares of the batch.

    Args:
        num_steps: How many steps count, after one to warm up.
    """

    def __init__(self, num_steps: int = 5) -> None:
        self.num_steps = num_steps
        self.seconds: dict[int, float] = defaultdict(float)  # by replica
        self._steps = 0
        self.is_done = False

    def timed(self, function: Callable[[int], Any], devices: Sequence[torch.device]) -> Callable[[int], Any]:
        """The function, adding up the time it takes for each replica while that is being measured."""
        if self.is_done:
            return function

        def timed_function(i: int) -> Any:
            start = time.perf_counter()
            result = function(i)
            if (module := device_module(devices[i])) is not None:
                module.synchronize(devices[i])
            self.seconds[i] += time.perf_counter() - start
            return result

        return timed_function

    def next_shares(self, shares: Sequence[float]) -> list[float] | None:
        """Called after every forward pass; the new shares once, when enough steps were timed."""
        if self.is_done:
            return None
        self._steps += 1
        if self._steps <= 2:  # the second forward pass is followed by the first backward pass that counts
            self.seconds.clear()
        if self._steps <= self.num_steps:
            return None
        self.is_done = True
        if len(self.seconds) < len(shares):  # batches too small for all devices
            return None
        speeds = [share / self.seconds[i] for i, share in enumerate(shares)]
        split = [speed / sum(speeds) for speed in speeds]
        rank_zero_info(f"split='auto': shares of the batch {[round(share, 3) for share in split]}")
        return split
