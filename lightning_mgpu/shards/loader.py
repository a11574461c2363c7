"""Each process gets the shards of its replicas, of every global batch, from any loader.

Where a loader is torch's own and knows the indices of its batches, the indices are cut, and a
process reads only its shards. Any other loader is read whole by every process.
"""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_mgpu.shards.checksum import excerpt
from lightning_mgpu.shards.reader import (
    ShardKeys,
    ShardReader,
    Shards,
    as_read,
    cut_indices,
    shards_of,
)
from lightning_mgpu.shards.split_batch import cut, leaves, num_samples, shard_sizes

NUMBERS = (Tensor, np.generic, int, float)


class ShardLoader:
    """A loader of this process's shards. Other attributes are those of the user's loader.

    In training, a process with several replicas gets `Shards`. In evaluation it gets one shard,
    and small batches are joined until every process has a sample.
    """

    def __init__(self, loader: Any, strategy: Any, trains: bool) -> None:
        k, replicas = strategy.num_replicas, strategy.local_replicas
        if not trains:  # one shard per process
            k, replicas = strategy.world_size, range(rank := strategy.global_rank, rank + 1)
        own = {"strategy": strategy, "trains": trains, "num_shards": k, "replicas": replicas}
        if hasattr(loader, "state_dict"):  # Lightning looks among an instance's attributes
            own |= {name: getattr(loader, name) for name in ("state_dict", "load_state_dict")}
        if makes_whole_batches(loader):  # from here, writers of predictions get indices
            own["batch_sampler"] = _IndexBatchSamplerWrapper(loader.sampler)
        vars(self).update(own, loader=loader, reading=loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.reading if name == "_iterator" else self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning shuts down the workers of an `_iterator`: that of the copy which reads
        setattr(self.reading if name == "_iterator" else self.loader, name, value)

    def __len__(self) -> int:
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        is_plain = type(sampler) is BatchSampler and knows_indices(self.loader)
        if not (is_plain and self._joins()):
            return len(self.loader)
        num, size = len(sampler.sampler), sampler.batch_size
        num -= num % size if sampler.drop_last else 0
        joined = -(-self.num_shards // size) * size
        return max(min(num, 1), num // joined + (num % joined >= self.num_shards))

    def _find_combined(self) -> Any:
        """The CombinedLoader of the loop that reads this one."""
        trainer = self.strategy.module.trainer
        loop = trainer.fit_loop if self.trains else trainer._active_loop
        return getattr(loop, "_combined_loader", None)

    def _joins(self) -> bool:
        """Whether small batches are joined: in an evaluation, of one loader after the other."""
        combined = self._find_combined()
        return not self.trains and combined is not None and combined._mode == "sequential"

    def __iter__(self) -> "Pass":
        module = self.strategy.module
        trainer = module.trainer
        combined = self._find_combined()
        loaders = combined.flattened if combined is not None else []
        number = next((i for i, each in enumerate(loaders) if each is self), None)
        # a hook may look at some batches, in one process only: no generator moves
        is_look = number is None or module._current_fx_name is not None
        keep = partial(kept, getattr(self.loader, "generator", None))
        guard = keep if is_look else self.strategy.kept_generators
        self.strategy.num_passes += not is_look
        # two loaders over one dataset, and all passes over one loader, draw other numbers
        where = [trainer.fit_loop.total_batch_idx, number]
        where += [] if trainer.state.fn == "fit" else [self.strategy.num_passes]
        seed = crc32(torch.get_rng_state().numpy().data, crc32(repr(where).encode()))
        with guard():
            if not knows_indices(self.loader):
                return Pass(self, seed, self._read_whole(iter(self.loader)), guard)
            if is_look or self.reading is self.loader or self.reading._iterator is None:
                sampler = ShardSampler(self)
                reading = self._copy(sampler)
            else:  # its workers live on
                sampler, reading = self.sampler_of_shards, self.reading
            if not is_look:
                vars(self).update(reading=reading, sampler_of_shards=sampler)
                sampler.limit = combined.limits[number]
            sampler.seed = seed
            return Pass(self, seed, iter(reading), guard)

    def _copy(self, sampler: "ShardSampler") -> Any:
        """A copy of the user's loader, as it is now, that reads shards."""
        loader, reader = copy.copy(self.loader), self.loader.dataset
        if not isinstance(reader, ShardReader):
            reader = ShardReader(reader, loader.collate_fn)
        name = "sampler" if makes_whole_batches(loader) else "batch_sampler"
        own = {"dataset": reader, "collate_fn": as_read, name: sampler, "_iterator": None}
        vars(loader).update(own)  # DataLoader does not let one set these
        return loader

    def _read_whole(self, batches: Iterator[Any]) -> Iterator[Shards]:
        k, replicas = self.num_shards, self.replicas
        sampler = getattr(self.loader, "batch_sampler", None)
        for number, batch in enumerate(batches):
            seen = getattr(sampler, "seen_batch_indices", None)
            if k == 1:
                yield Shards([batch], cut_indices(seen[number] if seen else [0], 1, replicas))
                continue
            refuse_single_sample(self.loader, batch)
            num, most = num_samples(batch), getattr(self.loader, "batch_size", None)
            if num > (most or num):
                raise ValueError(f"{num} samples in a batch of {most}: collate it to tensors.")
            keys = cut_indices([*(seen[number] if seen else range(num))], k, replicas)
            shards = cut(batch, shard_sizes(num, [1] * k))[replicas.start : replicas.stop]
            yield Shards(shards, keys._replace(order=crc32(excerpt(batch))), has_rows=True)


class Pass:
    """One pass over a loader, and what all processes have to find alike in it.

    `read` has the keys of the last two batches, as Lightning may be one ahead, and `None` after the
    last. `has_rows` tells whether a batch has one row per sample. `guard` is for the generators.
    """

    def __init__(self, loader: ShardLoader, seed: int, batches: Any, guard: Any) -> None:
        self.loader, self.batches, self.guard, self.numbers = loader, batches, guard, count()
        length = sized_len(getattr(loader.loader, "dataset", None)) or 0
        is_drawn = loader.trains and not makes_whole_batches(loader.loader)
        self.facts = {"seed": seed if is_drawn else 0, "dataset": length, "batches": 0}
        self.read, self.has_rows = deque[ShardKeys | None](maxlen=2), False

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        with self.guard():
            batch = next(self.batches, None)
        self.read.append(batch and batch.keys)
        if batch is None:
            raise StopIteration
        keys = batch.keys
        self.facts["batches"] = crc32(b"%d" % keys.order, self.facts["batches"])
        self.facts["dataset"] += batch.sample
        self.has_rows |= batch.has_rows
        # the indices of each batch that Lightning notes for `predict`
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        if hasattr(sampler, "seen_batch_indices"):
            number, indices = next(self.numbers), [i for each in keys.indices for i in each]
            sampler.seen_batch_indices[number:] = [indices]
        return batch if len(batch.shards) > 1 else batch.shards[0]


class ShardSampler:
    """Yields the keys of this process's shards of each batch, in the place of a batch sampler.

    It goes through the user's sampler as the DataLoader asks for batches, so that the sampler
    draws when, and what, it would draw on one device.
    """

    limit = float("inf")  # the batches that a pass takes at most

    def __init__(self, loader: ShardLoader) -> None:
        self.loader, self.seed, user = loader, 0, loader.loader
        self.sampler = user.sampler if makes_whole_batches(user) else user.batch_sampler

    def __iter__(self) -> Iterator[ShardKeys]:
        whole = getattr(self.sampler, "whole_batches", None)
        return self._cut(whole() if whole else map(list, iter(self.sampler)), self.seed)

    def _cut(self, batches: Iterator[list[Any]], seed: int) -> Iterator[ShardKeys]:
        k, replicas = self.loader.num_shards, self.loader.replicas
        # the limit of an evaluation counts joined batches
        limit = self.limit if self.loader.trains else float("inf")
        smallest = smallest_batch(self.sampler, limit)
        if self.loader.trains:
            shard_sizes(smallest or k, [1] * k)  # raises if one is empty
        elif self.loader._joins() and 1 < k > (smallest or 0):
            batches = join(batches, k, self.limit if smallest is None else limit)
        epoch = None
        if hasattr(self.sampler, "whole_batches"):  # of which the epoch is known by now
            seed, epoch = self.sampler.pass_seed, self.sampler.epoch
        for number, batch in enumerate(batches):
            if number == 0 and any(type(i).__repr__ is object.__repr__ for i in batch):
                raise TypeError(f"{type(batch[0])}, which a sampler yields, needs a `__repr__`.")
            has_probe = number == 0 and k > 1
            yield cut_indices(batch, k, replicas, number, seed, epoch, has_probe)


def shares_of_batch(trainer: Any, batch: Any) -> list[float]:
    """The share of each shard here in the global batch that a training step has got.

    Raises:
        ValueError: If the loaders do not tell.
    """
    combined = trainer.fit_loop._combined_loader
    ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
    passes = combined._iterator.iterators
    if all(each.read and each.read[-1] is None for each in passes):
        ahead += 1  # Lightning has looked for one more batch, and found none
    parts = combined._spec.flatten_up_to(batch) if len(passes) > 1 else [batch]
    shares = set()
    for each, part in zip(passes, parts):
        need_weight("a loader without a length begins again beside others", len(each.read) <= ahead)
        if (keys := each.read[-1 - ahead]) is None:
            continue  # this loader has ended
        what = "the shape of a batch does not tell how many samples are in it"
        need_weight(what, not each.has_rows)
        rows, sizes = [*map(num_samples, shards_of(part))], [*map(len, keys.indices)]
        need_weight(f"samples were left out, {rows} rows of {sizes}", rows != sizes)
        shares.add(tuple(size / keys.num_samples for size in sizes))
    need_weight(f"loaders have other shares of their batches, {sorted(shares)}", len(shares) != 1)
    return [*shares.pop()]


def need_weight(reason: str, is_needed: bool) -> None:
    if is_needed:
        how = 'The loss of a shard needs a weight, {"loss": loss, "weight": n}'
        raise ValueError(f"{how}: {reason}.")


@contextmanager
def kept(generator: torch.Generator | None) -> Iterator[None]:
    """Put back the global generators, and a loader's own."""
    state = generator.get_state() if generator is not None else None
    with isolate_rng(include_cuda=False):
        yield
    if generator is not None and state is not None:
        generator.set_state(state)


def makes_whole_batches(loader: Any) -> bool:
    """Whether its sampler yields whole batches by `whole_batches`, as that of `batch_loader`."""
    return hasattr(getattr(loader, "sampler", None), "whole_batches")


def knows_indices(loader: Any) -> bool:
    """Whether a loader is a DataLoader that reads what its batch sampler says, in order."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind: Any = type(loader)
    is_plain = kind.__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None
    is_plain = is_plain and kind._get_iterator is DataLoader._get_iterator
    return (is_plain or makes_whole_batches(loader)) and loader.in_order


def smallest_batch(sampler: Any, limit: float) -> int | None:
    """The fewest samples among the first `limit` batches, if torch's or our sampler tells."""
    if hasattr(sampler, "whole_batches"):
        return int(sampler.smallest_batch)
    num = sized_len(sampler.sampler) if type(sampler) is BatchSampler else None
    if num is None:
        return None
    whole, rest = divmod(num, sampler.batch_size)
    return rest if rest and whole < limit and not sampler.drop_last else sampler.batch_size


def refuse_single_sample(loader: Any, batch: Any) -> None:
    """Items of a map-style dataset without batches: (X, label), where X has time along dim 0."""
    parts = leaves(batch)
    arrays = [each for each in parts if getattr(each, "ndim", 0)]
    numbers = [each for each in parts if isinstance(each, NUMBERS) and not getattr(each, "ndim", 0)]
    is_map = not isinstance(getattr(loader, "dataset", None), (IterableDataset, type(None)))
    if is_map and getattr(loader, "batch_size", 1) is None and len(arrays) == 1 and numbers:
        raise ValueError(
            "DataLoader(batch_size=None) yields an array beside a number, which looks like one "
            "sample and not a batch: give it a batch_size, or the label one row per sample."
        )


def join(batches: Iterator[list[Any]], least: int, limit: float) -> Iterator[list[Any]]:
    """Join consecutive batches, until each of the first `limit` has `least` samples.

    It reads a batch ahead, except for the last one: a small last batch joins the one before it.
    """
    complete: list[Any] = []
    rest: list[Any] = []
    number = 1  # of the batch that may be complete
    for batch in batches:
        rest = rest + batch
        if len(rest) < least:
            continue
        if complete:
            yield complete
            number += 1
        complete, rest = rest, []
        if number >= limit:
            yield complete
            complete, number = [], number + 1
    if complete or rest:
        yield complete + rest
