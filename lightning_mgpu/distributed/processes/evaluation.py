"""Exact logging in evaluations: each number that a step logs becomes that of all samples."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.distributed.sharding.reader import Shard
from lightning_mgpu.distributed.sharding.split_batch import num_samples


class ExactLogging:
    """Edits Lightning's collection of logged values before and after each step.

    `results` is this collection: there is none in `predict`, and it is empty before the first step.
    `batch_shards` contains the step's `Shard` of each loader.
    """

    def __init__(self) -> None:
        self.averaged: Sequence[Any] = ()  # values that were logged without sync_dist

    def before_step(self, results: Any, batch_shards: Sequence[Shard], batch: Any) -> None:
        for value in self.averaged:  # as it was logged: Lightning compares
            value.meta.sync.should = False
        if results is not None and len(batch_shards) == 1:
            results.batch_size = count_samples(batch_shards[0], batch)

    def after_step(self, results: Any, batch_shards: Sequence[Shard]) -> list[str]:
        """Returns the names of the values that are averaged over all processes.

        Raises:
            MisconfigurationException: If it is not known by what shares these count.
        """
        named = {} if results is None else results
        logged = {n: v for n, v in named.items() if v.is_tensor and "_step" in v.meta.fx}
        synced = {n: v.meta.sync for n, v in logged.items() if not v.meta.sync.rank_zero_only}
        shares = {len(each.indices.samples) / each.indices.num_samples for each in batch_shards}
        if synced and len(shares) > 1:
            raise MisconfigurationException(
                f"The loaders of an evaluation have other shares of their batches, {sorted(shares)}"
                ": log torchmetrics objects, or give the loaders equal batch sizes."
            )
        self.averaged = [logged[name] for name, sync in synced.items() if not sync.should]
        for value in self.averaged:
            value.meta.sync.should = True
        return [*synced]


def count_samples(shard: Shard, batch: Any) -> int:
    """The rows of an evaluation's batch; its indices, if its shape does not tell."""
    if shard.has_rows:
        with suppress(ValueError):
            return num_samples(batch)
    return len(shard.indices.samples)
