"""A value that a step logs with `on_step=True` is the mean over the shards, or its `reduce_fx`."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def combine_logged_values(results: Any) -> Iterator[None]:
    """Around the steps of a batch's shards: `trainer._results` would keep the last one's values."""
    values_by_key = defaultdict(list)
    update = results.update_metrics

    def update_and_keep(key: str, value: Any, batch_size: int) -> None:
        update(key, value, batch_size)
        values_by_key[key].append(results[key]._forward_cache)

    results.update_metrics = update_and_keep
    yield
    del results.update_metrics
    for key, values in values_by_key.items():
        meta = results[key].meta
        if results[key].is_tensor and meta.on_step:
            values = [value.to(values[0].device) for value in values]
            results[key]._forward_cache = meta.reduce_fx(torch.stack(values))
