"""Loads this process's shard of every global batch, from any loader.

If a loader is a DataLoader with a batch sampler, indices are cut, and a process reads only its
shard. All batches of any other loader are read by every process.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils._pytree import tree_flatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_convert

from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.distributed.sharding.reader import (
    Probe,
    Shard,
    ShardIndices,
    ShardReader,
    cut_indices,
)
from lightning_mgpu.distributed.sharding.rng_states import RNGStates
from lightning_mgpu.distributed.sharding.split_batch import cut, num_samples, shard_sizes


class ShardLoader:
    """Wraps the user's loader, and yields this process's shards. Other attributes are the loader's.

    Loops receive `Shard` objects; other callers receive the batches in them. In an evaluation,
    small batches are joined until every process has a sample.

    Args:
        loader: The user's loader.
        strategy: Provides ranks, RNG contexts, and the Trainer whose loops read this loader.
    """

    loader: Any = None  # while it is copied

    def __init__(self, loader: Any, strategy: Any) -> None:
        trainer, k, rank = strategy.module.trainer, strategy.world_size, strategy.global_rank
        own: dict[str, Any] = {"trainer": trainer, "trains": trainer.training, "strategy": strategy}
        own |= {"num_shards": k, "rank": rank, "probe": None, "peek_rng": None}
        if hasattr(loader, "state_dict"):  # Lightning reads instance attributes
            own |= {name: getattr(loader, name) for name in ("state_dict", "load_state_dict")}
        if makes_whole_batches(loader):  # prediction writers read indices here
            own["batch_sampler"] = record = _IndexBatchSamplerWrapper(loader.sampler)
            record.seen_batch_indices = []
        vars(self).update(own, loader=loader, reading=loader)
        vars(self).update(sampler_of_shards=ShardSampler(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reading if name == "_iterator" else self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning shuts down the workers of `_iterator`, which belongs to the copy in use
        setattr(self.reading if name == "_iterator" else self.loader, name, value)

    def __len__(self) -> int:
        """An upper bound: a small last batch may be joined to the one before it."""
        size = getattr(self.loader, "batch_size", None)
        is_joined = size and knows_indices(self.loader) and self.joins()
        num_joined = -(-self.num_shards // size) if is_joined else 1
        return max(len(self.loader) // num_joined, 1)

    def _find_combined(self) -> Any:
        """The CombinedLoader of the loop that reads this one."""
        loop = self.trainer.fit_loop if self.trains else self.trainer._active_loop
        return getattr(loop, "_combined_loader", None)

    def joins(self) -> bool:
        """Whether small batches are joined: in an evaluation with sequential loaders."""
        is_sequential = getattr(self._find_combined(), "_mode", None) == "sequential"
        return is_sequential and self.num_shards > 1 and not self.trains

    def __iter__(self) -> Iterator[Any]:
        combined = self._find_combined()
        loaders = getattr(combined, "flattened", [])
        number = loaders.index(self) if self in loaders else None
        # a hook may read batches, even on one process only: this must not change the global RNGs
        is_peek = number is None or not starts_from(loaders)
        if is_peek and self.peek_rng is None:
            vars(self).update(peek_rng=RNGStates())
        guard = self.peek_rng.swapped_in if is_peek else self.strategy.draw_for_loader
        # loaders of one dataset, and passes over one loader, draw different random numbers
        where = [self.trainer.fit_loop.total_batch_idx, number]
        is_fitting = self.trainer.state.fn == "fit"
        where += [] if is_peek or is_fitting else [next(self.strategy.numbers_of_passes)]
        with guard():
            seed = crc32(torch.get_rng_state().numpy().data, crc32(repr(where).encode()))
            if not knows_indices(self.loader):
                return self._iterate(self._read_whole(iter(self.loader)), seed, guard, is_peek)
            reading = self.reading  # with its persistent workers, if any
            if is_peek or reading is self.loader or reading._iterator is None:
                reading = self._copy()
            if not is_peek:
                vars(self).update(reading=reading)
            self.sampler_of_shards.seed = seed
            return self._iterate(iter(reading), seed, guard, is_peek)

    def _copy(self) -> Any:
        """Copy the user's loader, in its current state, to read shards."""
        loader, reader = copy.copy(self.loader), self.loader.dataset
        if not isinstance(reader, ShardReader):
            reader = ShardReader(reader, loader.collate_fn)
        name = "sampler" if makes_whole_batches(loader) else "batch_sampler"
        # `vars`, because DataLoader forbids to set these; `default_convert` returns a `Shard` as is
        vars(loader).update({"dataset": reader, name: self.sampler_of_shards, "_iterator": None})
        vars(loader).update({"collate_fn": default_convert, "in_order": True})
        return loader

    def _read_whole(self, batches: Iterator[Any]) -> Iterator[Shard]:
        k, rank, loader = self.num_shards, self.rank, self.loader
        is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if k > 1 and is_map and loader.batch_sampler is None:
            raise ValueError(
                "DataLoader(batch_size=None) cannot be split: it may yield samples or batches. "
                "Set batch_size or batch_sampler, or yield batches from an IterableDataset."
            )
        sampler, most = getattr(loader, "batch_sampler", None), getattr(loader, "batch_size", None)
        for number, batch in enumerate(batches):
            num = num_samples(batch) if k > 1 else 1
            seen = getattr(sampler, "seen_batch_indices", None)
            indices = cut_indices(seen[number] if seen else [*range(num)], k, rank, number)
            if k == 1:
                yield Shard(batch, indices)
                continue
            if num > (most or num):
                raise ValueError(f"{num} samples in a batch of {most}: collate it to tensors.")
            part = cut(batch, shard_sizes(num, [1] * k))[rank]
            first, _, last = cut(batch, [1, num - 2, 1])
            indices = indices._replace(order=checksum([num, first, last]))
            yield Shard(part, indices, Probe(0, True))

    def _iterate(self, batches: Any, seed: int, guard: Any, is_peek: bool) -> Iterator[Any]:
        """Iterate over one pass, and attach the `invariants` of its batches."""
        is_drawn = self.trains and not makes_whole_batches(self.loader)
        length = sized_len(getattr(self.loader, "dataset", None)) or 0
        invariants = {"seed": seed if is_drawn else 0, "dataset": length, "batches": 0}
        while True:
            with guard():
                batch = next(batches, None)
            if batch is None:
                return
            if is_peek:  # requested by a hook or a script, not by a loop
                yield batch.batch
                continue
            indices, probe = batch.indices, batch.probe or self.probe
            vars(self).update(probe=probe)
            if probe is not None:
                batch.has_rows = probe.has_one_row
                invariants["dataset"] += probe.checksum if indices.number == 0 else 0
            invariants["batches"] = crc32(b"%d" % indices.order, invariants["batches"])
            batch.invariants = {**invariants}
            # the indices of each batch, which Lightning reads in `predict`
            sampler: Any = getattr(self, "batch_sampler", None)
            if hasattr(sampler, "seen_batch_indices"):
                place = slice(indices.number, indices.number + 1)
                sampler.seen_batch_indices[place] = [indices.samples]
            yield batch


class ShardSampler:
    """A batch sampler that yields the indices of this process's shard of each batch.

    It iterates over the user's sampler lazily, so the sampler draws the same random numbers, at
    the same time, as on one device.
    """

    def __init__(self, loader: ShardLoader) -> None:
        self.loader, self.seed = loader, 0  # seed of the next pass

    def __iter__(self) -> Iterator[ShardIndices]:
        loader = self.loader.loader
        if makes_whole_batches(loader):  # its epoch is set by now
            sampler = loader.sampler
            return self._cut(sampler, sampler.whole_batches(), sampler.pass_seed, sampler.epoch)
        return self._cut(loader.batch_sampler, map(list, loader.batch_sampler), self.seed, None)

    def _cut(self, sampler: Any, batches: Any, *epoch_key: Any) -> Iterator[ShardIndices]:
        k, rank = self.loader.num_shards, self.loader.rank
        if self.loader.trains:
            shard_sizes(smallest_batch(sampler) or k, [1] * k)  # raises if one is empty
        if self.loader.joins() and (smallest_batch(sampler) or 0) < k:
            batches = join(batches, k)
        for number, batch in enumerate(batches):
            probe = batch if number == 0 and k > 1 and self.loader.probe is None else ()
            yield cut_indices(batch, k, rank, number, *epoch_key, probe)


def share_of_batch(loader_batch: Any, batch: Any) -> float:
    """This process's share of the samples in the global batch of a training step.

    Args:
        loader_batch: The batch as received by the loop, with `Shard` objects.
        batch: The batch after the transfer hooks.

    Raises:
        ValueError: If the share is ambiguous.
    """
    loaders, spec = tree_flatten(loader_batch)
    shares = set()
    for number, shard in enumerate(loaders):
        if shard is None:
            continue  # this loader is exhausted
        reason = "the number of samples cannot be inferred from the shape of a batch"
        need_weight(reason, not shard.has_rows)
        num, size = num_samples(spec.flatten_up_to(batch)[number]), len(shard.indices.samples)
        need_weight(f"samples were dropped, {num} of {size} remain", num != size)
        shares.add(size / shard.indices.num_samples)
    need_weight(f"its shares of the loaders' batches differ, {sorted(shares)}", len(shares) != 1)
    return shares.pop()


def need_weight(reason: str, is_needed: bool) -> None:
    if is_needed:
        rule = 'The loss of a shard needs a weight, {"loss": loss, "weight": n}'
        raise ValueError(f"{rule}: {reason}.")


def starts_from(loaders: Any) -> bool:
    """Whether the caller was called by an iterator over these loaders, and not by a hook.

    A CombinedLoader starts its loaders with `iter`, which passes no information on its caller.
    """
    caller = sys._getframe(2)
    # in Python 3.11, a list comprehension has a separate frame
    callers = [frame for frame in (caller, caller.f_back) if frame is not None]
    return any(getattr(x.f_locals.get("self"), "iterables", None) is loaders for x in callers)


def makes_whole_batches(loader: Any) -> bool:
    """Whether the sampler has `whole_batches`, like the sampler of `batch_loader`."""
    return hasattr(getattr(loader, "sampler", None), "whole_batches")


def knows_indices(loader: Any) -> bool:
    """Whether a loader is a DataLoader that reads the indices of its batch sampler."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    kind: Any = type(loader)
    is_plain = kind.__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None
    is_plain = is_plain and kind._get_iterator is DataLoader._get_iterator
    return is_plain or makes_whole_batches(loader)


def smallest_batch(sampler: Any) -> int | None:
    """The size of the smallest batch; None if the sampler's class is unknown."""
    if type(sampler) is BatchSampler and (num := sized_len(sampler.sampler)) is not None:
        rest = 0 if sampler.drop_last else num % sampler.batch_size
        return rest or sampler.batch_size
    return getattr(sampler, "smallest_batch", None)


def join(batches: Iterator[list[Any]], least: int) -> Iterator[list[Any]]:
    """Join consecutive batches until each has at least `least` samples.

    It reads a batch ahead: a small last batch is joined to the one before it.
    """
    complete, rest = list[Any](), list[Any]()
    for batch in batches:
        rest = rest + batch
        if len(rest) >= least:
            if complete:
                yield complete
            complete, rest = rest, []
    if complete or rest:
        yield complete + rest
