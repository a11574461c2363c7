"""Exact logging in evaluation: logged values are reduced to their mean over all samples."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_mgpu.distributed.sharding.reader import Shard
from lightning_mgpu.distributed.sharding.split_batch import num_samples


class ExactLogging:
    """Edits Lightning's collection of logged values before and after each step.

    `results` is this collection: None in `predict`, and empty before the first step.
    `batch_shards` contains the step's `Shard` of each loader.
    """

    def __init__(self) -> None:
        self.averaged: Sequence[Any] = ()  # values that were logged without sync_dist

    def before_step(self, results: Any, batch_shards: Sequence[Shard], batch: Any) -> None:
        for value in self.averaged:  # reset: Lightning compares it with the logged flag
            value.meta.sync.should = False
        if results is not None and len(batch_shards) == 1:
            results.batch_size = count_samples(batch_shards[0], batch)

    def after_step(self, results: Any, batch_shards: Sequence[Shard]) -> list[str]:
        """Return the names of the values that are averaged over all processes.

        Raises:
            MisconfigurationException: If this process's share of a batch differs between loaders.
        """
        named = {} if results is None else results
        logged = {n: v for n, v in named.items() if v.is_tensor and "_step" in v.meta.fx}
        synced = {n: v.meta.sync for n, v in logged.items() if not v.meta.sync.rank_zero_only}
        shares = {len(shard.indices.samples) / shard.indices.num_samples for shard in batch_shards}
        if synced and len(shares) > 1:
            raise MisconfigurationException(
                f"This process's share of a batch differs between loaders, {sorted(shares)}: log "
                "torchmetrics objects, or use the same batch size in all loaders."
            )
        self.averaged = [logged[name] for name, sync in synced.items() if not sync.should]
        for value in self.averaged:
            value.meta.sync.should = True
        return [*synced]


def count_samples(shard: Shard, batch: Any) -> int:
    """The number of samples in a batch, from its shape if possible, else from its indices."""
    if shard.has_rows:
        with suppress(ValueError):
            return num_samples(batch)
    return len(shard.indices.samples)
