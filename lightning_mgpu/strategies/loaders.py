"""Each process gets the shards of its replicas, of every global batch, from any loader.

Where a loader is torch's own and knows the indices of its batches, the indices are cut, and a
process reads only its shards. Any other loader is read whole by every process.
"""

import copy
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, count
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_mgpu.shards import ShardKeys, ShardReader, Shards, as_read, excerpt
from lightning_mgpu.strategies.split_batch import cut, num_samples, shard_sizes


class ShardLoader:
    """A loader of this process's shards. Other attributes are those of the user's loader.

    In training, a process with several replicas gets `Shards`. In evaluation it gets one shard,
    and small batches are joined until every process has a sample.
    """

    def __init__(self, loader: Any, strategy: Any, trains: bool) -> None:
        k = strategy.num_replicas if trains else strategy.world_size
        r = k // strategy.world_size
        replicas = range(strategy.global_rank * r, (strategy.global_rank + 1) * r)
        own = {"strategy": strategy, "trains": trains, "num_shards": k, "replicas": replicas}
        if hasattr(loader, "state_dict"):  # Lightning looks among an instance's attributes
            own |= {name: getattr(loader, name) for name in ("state_dict", "load_state_dict")}
        vars(self).update(own, loader=loader, reading=loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.reading if name == "_iterator" else self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning shuts down the workers of an `_iterator`: that of the copy which reads
        setattr(self.reading if name == "_iterator" else self.loader, name, value)

    def __len__(self) -> int:
        sampler = getattr(self.loader, "batch_sampler", None)
        if self.trains or type(sampler) is not BatchSampler or not knows_indices(self.loader):
            return len(self.loader)
        num, size = len(sampler.sampler), sampler.batch_size  # type: ignore[arg-type]
        num -= num % size if sampler.drop_last else 0
        joined = -(-self.num_shards // size) * size
        return max(min(num, 1), num // joined + (num % joined >= self.num_shards))

    def __iter__(self) -> "Pass":
        trainer = self.strategy.module.trainer
        loop = trainer.fit_loop if self.trains else trainer._active_loop
        combined = loop._combined_loader
        number = next((i for i, each in enumerate(combined.flattened) if each is self), None)
        # two loaders over one dataset, and the passes of a cycled one, draw other numbers
        where = repr((trainer.fit_loop.total_batch_idx, number)).encode()
        seed = crc32(torch.get_rng_state().numpy().data, crc32(where))
        if not knows_indices(self.loader):
            return Pass(self, seed, self._read_whole(iter(self.loader)))
        if self.reading is self.loader or self.reading._iterator is None:
            self._copy()
        sampler = self.reading.batch_sampler
        sampler.seed, sampler.limit = seed, 0 if number is None else combined.limits[number]
        # a hook of one process may look at some batches: others draw nothing meanwhile
        with isolate_rng(include_cuda=False) if number is None else nullcontext():
            batches = iter(self.reading)
        return Pass(self, seed, batches)

    def _copy(self) -> None:
        """Copy the user's loader as it is now, so that the copy reads shards."""
        loader = copy.copy(self.loader)
        reader = ShardReader(loader.dataset, loader.collate_fn)
        own = {"dataset": reader, "collate_fn": as_read, "batch_sampler": ShardSampler(self)}
        vars(loader).update(own, _iterator=None)  # DataLoader does not let one set these
        vars(self).update(reading=loader)

    def _read_whole(self, batches: Iterator[Any]) -> Iterator[Shards]:
        sampler = getattr(self.loader, "batch_sampler", None)
        for number, batch in enumerate(batches):
            num, most = num_samples(batch), getattr(self.loader, "batch_size", None)
            if num > (most or num):
                raise ValueError(f"{num} samples in a batch of {most}: collate it to tensors.")
            sizes = shard_sizes(num, [1] * self.num_shards)
            seen = getattr(sampler, "seen_batch_indices", None)
            indices = pieces(seen[number] if seen else range(sum(sizes)), sizes, self.replicas)
            shards = cut(batch, sizes)[self.replicas.start : self.replicas.stop]
            yield Shards(shards, indices, crc32(excerpt(batch)))


class Pass:
    """One pass over a loader, and what all processes have to find alike in it.

    `sizes` are the numbers of samples in this process of the last two batches. `is_counted` tells
    whether a batch's own shape has given the same numbers.
    """

    def __init__(self, loader: ShardLoader, seed: int, batches: Iterator[Shards]) -> None:
        self.loader, self.batches, self.numbers = loader, batches, count()
        length = sized_len(getattr(loader.loader, "dataset", None)) or 0
        self.facts = {"seed": seed if loader.trains else 0, "dataset": length, "batches": 0}
        self.sizes, self.is_counted = deque[int](maxlen=2), True

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.facts["batches"] = crc32(b"%d" % batch.order, self.facts["batches"])
        self.facts["dataset"] += batch.sample
        self.sizes.append(sum(map(len, batch.indices)))
        self.is_counted &= all(map(has_samples, batch.shards, batch.indices))
        # the indices of each batch that Lightning notes for `predict`
        sampler: Any = getattr(self.loader.loader, "batch_sampler", None)
        if hasattr(sampler, "seen_batch_indices"):
            indices = [index for each in batch.indices for index in each]
            sampler.seen_batch_indices[next(self.numbers)] = indices
        return batch if len(batch.shards) > 1 else batch.shards[0]


class ShardSampler:
    """Yields the keys of this process's shards of each batch, in the place of a batch sampler.

    It goes through the user's sampler as the DataLoader asks for batches, so that the sampler
    draws when, and what, it would draw on one device.
    """

    seed = 0  # of the pass that begins
    limit = 0.0  # the batches that it takes at most

    def __init__(self, loader: ShardLoader) -> None:
        self.loader, self.sampler = loader, loader.batch_sampler

    def __iter__(self) -> Iterator[ShardKeys]:
        return self._cut(map(to_list, iter(self.sampler)), self.seed)

    def _cut(self, batches: Iterator[list[Any]], seed: int) -> Iterator[ShardKeys]:
        k, replicas = self.loader.num_shards, self.loader.replicas
        if self.loader.trains:
            shard_sizes(smallest_batch(self.sampler, self.limit), [1] * k)  # raises if one is empty
        else:
            batches = join(batches, k)
        for number, batch in enumerate(batches):
            indices = pieces(batch, shard_sizes(len(batch), [1] * k), replicas)
            order, probe = crc32(repr(batch).encode()), batch[:1] if number == 0 else []
            yield ShardKeys(indices, replicas, number, order, seed, probe)


def knows_indices(loader: Any) -> bool:
    """Whether a loader is a DataLoader that reads what its batch sampler says, in order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind: Any = type(loader)
    is_plain = kind.__iter__ is DataLoader.__iter__
    is_plain = is_plain and kind._get_iterator is DataLoader._get_iterator
    return is_plain and loader.batch_sampler is not None and loader.in_order


def smallest_batch(sampler: Any, limit: float) -> int:
    """The fewest samples among the first `limit` batches. Only torch's own sampler tells."""
    num = sized_len(sampler.sampler) if type(sampler) is BatchSampler else None
    if num is None:
        return sys.maxsize
    whole, rest = divmod(num, sampler.batch_size)
    return rest if rest and whole < limit and not sampler.drop_last else sampler.batch_size


def to_list(batch: Any) -> list[Any]:
    return batch.tolist() if isinstance(batch, Tensor) else list(batch)


def join(batches: Iterator[list[Any]], least: int) -> Iterator[list[Any]]:
    """Join consecutive batches, until each has `least` samples."""
    complete: list[Any] = []
    rest: list[Any] = []
    for batch in batches:
        rest = rest + batch
        if len(rest) >= least:
            if complete:
                yield complete
            complete, rest = rest, []
    if complete or rest:
        yield complete + rest


def pieces(items: Sequence[Any], sizes: list[int], replicas: range) -> list[Any]:
    """The consecutive pieces of some replicas."""
    ends = [0, *accumulate(sizes)]
    return [items[ends[i] : ends[i + 1]] for i in replicas]


def has_samples(shard: Any, indices: Sequence[Any]) -> bool:
    try:
        return num_samples(shard) == len(indices)
    except ValueError:
        return False
