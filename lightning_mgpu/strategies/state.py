"""What a step changes in Python: attributes, dicts, lists and sets. Every replica has its own.

Layers, and objects and containers that they hold, are found when a step begins, and copied for
every replica. A turn exchanges the `__dict__` of layers and objects. When all are through, what
replicas have changed is put together in the first one's, which are the user's:

| changed | afterwards |
| --- | --- |
| a key or an attribute that only some replicas have assigned or deleted | so for all |
| a number, text or `None` that every replica has assigned | the first one's |
| anything else that every replica has assigned: a hidden state | each its own, in its next step |
| items added to a list, a deque, a set; what a `Counter` counts | all, in the batch's order |

What may not be what one device would have is warned of by its name.
"""

import copy
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.split_batch import bring_home, leaves, send

TENSORS = ("_parameters", "_buffers", "_modules", "_flat_weights", "_device")  # of a layer
OF_MODULES = {*vars(LightningModule()), *TENSORS}  # no state of the user's
CONTAINERS = (list, deque, dict, set, SimpleNamespace)
ARRAYS = (Tensor, np.ndarray)
NUMBERS = (int, float, complex)
PLAIN = (*NUMBERS, str, bytes, type(None))
NO_STATE: tuple[type, ...] = (nn.Module, type, Enum, Optimizer, Trainer, Strategy, Callback)
NO_STATE += (Dataset, DataLoader, LightningDataModule, Logger, logging.Logger, threading.local)
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Thread)
DEPTH = 4  # containers in containers
MANY = 1000  # a larger dict or set is one for all replicas
FEW = 100  # in larger containers nothing is looked for
MISSING = object()
HEAP_TYPE = 1 << 9  # CPython's flag of classes that were written in Python


class Changes(NamedTuple):
    """What a replica's step has changed in a namespace or a container."""

    assigned: dict[Any, Any]  # by key, or by index
    removed: set[Any]  # keys
    added: list[Any]  # items
    dropped: int  # how many items at the front


class Found(NamedTuple):
    """A layer, an object or a container that replicas have their own of."""

    value: Any
    store: Any  # its namespace, or the container itself
    place: tuple[int, Any] | None = None  # where it was found: the id of a store, and a key in it
    depth: int = 0
    is_owner: bool = True  # a turn exchanges its `__dict__`; else a copy stands where it was found


class Queue(deque):
    """A replica's copy of a `deque`, which knows what was added: the first items may have left."""

    def __init__(self, items: Iterable[Any], maxlen: int | None) -> None:
        super().__init__(items, maxlen)
        self.added: list[Any] = []

    def append(self, item: Any) -> None:
        super().append(item)
        self.added.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        for item in items:
            self.append(item)


class State:
    """The namespaces and containers of k replicas. Those of the first are the user's."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        notes: Notes,
        localize: Callable[[dict[str, Any], int], None],
    ) -> None:
        self.devices, self.notes = devices, notes
        self.localize = localize  # puts replica i's tensors into the namespace of a layer
        self.kept: dict[Any, tuple[Any, dict[Any, tuple[Any, ...]]]] = {}  # see `_keep`
        self.clear()

    def clear(self) -> None:
        """Let go of all copies but of hidden states."""
        self._found: list[Found] = []
        self._links: list[tuple[int, Any, int]] = []  # a store, a key, the container there
        self._arrays: list[tuple[int, Any]] = []  # a store, and a key of tensors or arrays in it
        self.modules: list[tuple[str, nn.Module]] = []  # that no layer holds as such
        self.owners: list[Any] = []  # layers, then objects: the first namespaces are theirs
        self.own: list[list[Any]] = []  # by replica: its namespaces, then its containers
        self._start: list[list[Any]] = []  # the same, when the step began

    def find(self, layers: Sequence[Any], shared: Sequence[Any], others: Sequence[Any]) -> None:
        """Find every namespace and container once, from the layers and `others` on, and metrics.

        `shared` are objects that stay one for all replicas.
        """
        self.clear()
        found = [Found(owner, vars(owner)) for owner in (*layers, *others)]
        seen = {id(each.store) for each in found} | {id(vars(each)) for each in shared}
        links: list[tuple[int, Any, int]] = []
        arrays: list[tuple[int, Any]] = []
        for parent in found:  # which grows
            for key, value in _children(parent.store) if parent.depth < DEPTH else ():
                if isinstance(value, nn.Module):  # of which no layer knows, a metric perhaps
                    self.modules.append((str(key), value))
                elif isinstance(value, (Tensor, np.ndarray)):
                    arrays.append((id(parent.store), key))
                elif (store := _store_of(value)) is not None:
                    place, is_owner = (id(parent.store), key), not _is_container(value)
                    if not is_owner:
                        links.append((*place, id(store)))
                    if id(store) not in seen:
                        seen.add(id(store))
                        found.append(Found(value, store, place, parent.depth + 1, is_owner))
                elif isinstance(value, tuple) and any(map(_is_array, leaves(value))):
                    arrays.append((id(parent.store), key))
        self._found = sorted(found, key=lambda each: not each.is_owner)
        self._number = {id(each.store): n for n, each in enumerate(self._found)}
        self._links = [(self._number[a], key, self._number[b]) for a, key, b in links]
        self._arrays = [(self._number[store], key) for store, key in arrays]
        self.owners = [each.value for each in self._found if each.is_owner]

    def begin(self, step: int, meets: bool) -> None:
        """A step begins, in which replicas may meet: give every replica its own."""
        self.step, self.meets = step, meets
        first = [each.store for each in self._found]
        self.own = [first, *(self._copy_for(i) for i in range(1, len(self.devices)))]
        self._start = [
            [list(each) if isinstance(each, deque) else copy.copy(each) for each in stores]
            for stores in self.own
        ]
        self._versions = [
            [(n, key, stores[n][key], _versions(stores[n][key])) for n, key in self._arrays]
            for stores in self.own
        ]

    def _copy_for(self, i: int) -> list[Any]:
        """The namespaces and containers of replica i, with what it has kept of earlier steps."""
        values = [copy.copy(each.store if each.is_owner else each.value) for each in self._found]
        values = [Queue(each, each.maxlen) if type(each) is deque else each for each in values]
        stores = [_namespace(value) for value in values]
        memo: dict[int, Any] = {}  # tensors that are the same stay the same
        for n, key in self._arrays:
            if not isinstance(stores[n], tuple):
                stores[n][key] = self._copy_array(stores[n][key], i, memo)
        for each, own in zip(self._found, stores):
            if isinstance(each.value, nn.Module):
                self.localize(own, i)
        for parent, key, child in reversed(self._links):  # so a tuple is complete before its holder
            if isinstance(holder := stores[parent], tuple):
                items = (*holder[:key], values[child], *holder[key + 1 :])
                stores[parent] = values[parent] = items
            else:
                holder[key] = values[child]
        for each, own in zip(self._found, stores):
            kept = self.kept.get((self.step, i, id(each.store)))
            for key, (value, base, versions) in kept[1].items() if kept else ():
                now = _get(each.store, key)
                if _is_still(now, base) and _versions(now) == versions:  # no hook has changed it
                    own[key] = value if _has_graph(now) else _detached(value)
        return stores

    def _copy_array(self, value: Any, i: int, memo: dict[int, Any]) -> Any:
        """Replica i's copy of a tensor, an array, or a tuple of them, which a step may edit."""
        if isinstance(value, tuple):
            return apply_to_collection(value, ARRAYS, lambda each: self._copy_array(each, i, memo))
        if id(value) not in memo:
            is_home = isinstance(value, Tensor) and value.device == self.devices[0]
            if isinstance(value, np.ndarray):
                memo[id(value)] = value.copy()
            elif value.requires_grad:  # of a graph, or a parameter
                memo[id(value)] = send(value, self.devices[0], self.devices[i])
            else:
                memo[id(value)] = value.to(self.devices[i] if is_home else value.device, copy=True)
        return memo[id(value)]

    def changes(self, i: int, size: int) -> dict[int, Changes]:
        """What replica i's step has changed, by the number of the namespace or container."""
        pairs = enumerate(zip(self._start[i], self.own[i]))
        changes = {n: _changes(*pair, size) for n, pair in pairs if not _is_same(*pair)}
        for n, key, value, versions in self._versions[i]:
            if _get(self.own[i][n], key) is value and _versions(value) != versions:
                changes.setdefault(n, Changes({}, set(), [], 0)).assigned[key] = value
        return changes

    def combine(self, changes: Mapping[int, Mapping[int, Changes]], sizes: dict[int, int]) -> None:
        """Put together what the active replicas have changed, in the first one's."""
        for n in sorted({n for each in changes.values() for n in each}):
            store, by_replica = (
                self._found[n].store,
                {i: c[n] for i, c in changes.items() if n in c},
            )
            if isinstance(store, set):
                store.update(*(change.added for change in by_replica.values()))
                store.difference_update(*(change.removed for change in by_replica.values()))
                continue
            if isinstance(store, (list, deque)):
                self._combine_items(n, by_replica)
                if any(change.added for change in by_replica.values()):
                    continue
            for key in dict.fromkeys(key for each in by_replica.values() for key in each.removed):
                store.pop(key, None)
            for key in dict.fromkeys(key for each in by_replica.values() for key in each.assigned):
                if not (n < len(self.owners) and key in TENSORS):
                    assigned = {
                        i: c.assigned[key] for i, c in by_replica.items() if key in c.assigned
                    }
                    self._combine_values(n, key, assigned, sizes)

    def _combine_values(
        self, n: int, key: Any, values: dict[int, Any], sizes: dict[int, int]
    ) -> None:
        """Put together what replicas have assigned to an attribute, a key or an index."""
        store, before = self._found[n].store, _get(self._start[0][n], key)
        given, home, sized = [*values.values()], self.devices[0], [sizes[i] for i in values]
        is_attribute, is_partial = n < len(self.owners), len(values) < len(sizes)
        if isinstance(store, Counter):
            store[key] += sum(count for i, count in values.items() if i)
        elif not is_attribute and before is MISSING and _are_collected(values, sizes):
            whole = given[0]
            for value in given[1:]:
                (whole.extend if hasattr(whole, "extend") else whole.update)(value)
            store[key] = bring_home(whole, home)
        elif isinstance(before, list) and all(_begins_with(value, before) for value in given):
            store[key] = before + [
                item for each in given for item in bring_home(each[len(before) :], home)
            ]
        elif is_partial:
            is_first = is_attribute and all(map(_is_number, given))
            if _get(store, key) is MISSING or not is_first:
                store[key] = bring_home(given[-1], home)  # the others have not touched it
            if all(map(_is_number, (before, *given))) and not (self.meets and [*values] == [0]):
                self.notes.warn(self._first_stays(n, key))
        elif all(map(_is_plain, given)):
            if _are_of_shards(before, given, sized):
                self.notes.warn(self._first_stays(n, key))
        else:
            if _get(store, key) is MISSING:
                store[key] = bring_home(given[0], home)
            self._note_values(self._first_stays(n, key), before, given, sized)
            for i, value in values.items():
                if i:
                    self._keep(i, store, key, value)

    def _note_values(self, message: str, before: Any, given: list[Any], sizes: list[int]) -> None:
        """Note what looks like a result of a shard, and not like a hidden state of its samples."""
        if all(isinstance(value, list) for value in given):
            if all(map(_is_plain, (item for value in given for item in value))):
                if any(value != given[0] for value in given):
                    self.notes.warn(message)
            elif any(len(value) < 2 or not _is_state(value, n) for value, n in zip(given, sizes)):
                self.notes.warn(message)
        if not all(isinstance(value, ARRAYS) for value in given):
            return
        tensors = [torch.as_tensor(value) for value in given]
        if any(tensor.layout != torch.strided for tensor in tensors) or all(
            size in tensor.shape for tensor, size in zip(tensors, sizes)
        ):
            return
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            self.notes.warn(message)
            return
        self.notes.compare(message, tensors)
        if isinstance(before, Tensor) and not before.ndim and not tensors[0].is_complex():
            change = tensors[0] - before.to(tensors[0].device)
            is_multiple = torch.stack([change % size == 0 for size in sizes]).all()
            self.notes.flag(message, (change > 1) & is_multiple)

    def _first_stays(self, n: int, key: Any) -> str:
        return f"A step gives {self._name(n, key)} a value of its shard: the first replica's stays."

    def _keep(self, i: int, store: Any, key: Any, value: Any) -> None:
        """Keep replica i's value for its next such step, unless a hook edits the first one's.

        What a training step has assigned, validation does not see.
        """
        base = _get(store, key)
        _, kept = self.kept.setdefault((self.step, i, id(store)), (store, {}))
        kept[key] = value, base, _versions(base)

    def _combine_items(self, n: int, changes: dict[int, Changes]) -> None:
        """Replay on the first replica's list what the others have dropped and added."""
        store = self._found[n].store
        is_limited = isinstance(store, deque) and store.maxlen is not None
        if not is_limited and any(change.dropped for change in changes.values()):
            self.notes.warn(
                f"A step drops items from {self._name(n)}: which stay may depend on the number of "
                "devices. Collect them in a hook."
            )
        for i, change in changes.items():
            if i:
                for _ in range(0 if is_limited else min(change.dropped, len(store))):
                    del store[0]
                store.extend(bring_home(change.added, self.devices[0]))

    def _name(self, n: int, *key: Any) -> str:
        """A namespace or container, or a value in it, as a message says it."""
        path = list(key)
        while place := self._found[n].place:
            n, key_there = self._number[place[0]], place[1]
            path.insert(0, key_there)
        attribute, *keys = path
        owner = type(self._found[n].value).__name__
        return f"{attribute}{''.join(f'[{each!r}]' for each in keys)} of {owner}"


def _children(store: Any) -> Iterator[tuple[Any, Any]]:
    """What may hold containers: values of a layer's attributes, of a dict, and of a short list."""
    is_namespace = isinstance(store, dict) and "_modules" in store
    if isinstance(store, set) or (len(store) > FEW and not is_namespace):
        return
    if is_namespace and "dynamo_ctx" in store:  # of a compiled module: torch's own
        return
    for key, value in _items(store):
        if not isinstance(value, PLAIN) and not (is_namespace and key in OF_MODULES):
            yield key, value


def _is_array(value: Any) -> bool:
    return isinstance(value, ARRAYS)


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or type(value) is tuple


def _store_of(value: Any) -> Any:
    """The container itself, or the namespace of an object. None if neither is the replicas' own."""
    if type(value) is tuple:
        return value if any(_store_of(item) is not None for item in value) else None
    if _is_container(value):
        is_long = isinstance(value, (dict, set)) and len(value) > MANY
        return None if is_long else _namespace(value)
    if not _has_state(type(value)):  # type: ignore[arg-type]
        return None
    is_of_threads = any(isinstance(each, LOCKS) for each in vars(value).values())
    return None if is_of_threads else vars(value)  # which other threads may write into


def _namespace(value: Any) -> Any:
    return vars(value) if isinstance(value, SimpleNamespace) else value  # which has no other one


@cache
def _has_state(cls: Any) -> bool:
    """Whether instances have a `__dict__` that a turn can exchange, and are nobody else's."""
    is_pythons = cls.__flags__ & HEAP_TYPE and cls.__dictoffset__ and not hasattr(cls, "__next__")
    return bool(is_pythons) and not issubclass(cls, NO_STATE)


def _items(store: Any) -> Any:
    return store.items() if isinstance(store, dict) else enumerate(store)


def _get(store: Any, key: Any) -> Any:
    if isinstance(store, dict):
        return store.get(key, MISSING)
    return store[key] if key < len(store) else MISSING


def _is_same(start: Any, own: Any) -> bool:
    if isinstance(own, set):
        return bool(start == own)
    if len(start) != len(own):
        return False
    if isinstance(own, dict):
        return all(map(is_, start.values(), own.values())) and all(map(is_, start, own))
    if isinstance(own, Queue) and own.added:
        return False
    return all(map(is_, start, own))


def _changes(start: Any, own: Any, size: int) -> Changes:
    if isinstance(own, set):
        return Changes({}, start - own, list(own - start), 0)
    if isinstance(own, dict):
        new = {key: each for key, each in own.items() if start.get(key, MISSING) is not each}
        if isinstance(own, Counter):
            new = {key: count - start[key] for key, count in new.items()}
        return Changes(new, start.keys() - own.keys(), [], 0)
    before, now = list(start), list(own)
    if isinstance(own, Queue) and own.added and own.maxlen is not None:
        return Changes({}, set(), own.added, 0)
    moved = {id(item): n for n, item in reversed([*enumerate(before)]) if not _is_plain(item)}
    dropped = moved.get(id(now[0]), len(before)) if now else len(before)
    dropped = 0 if before and now and before[0] is now[0] else dropped
    if len(before) == len(now) and dropped in (0, len(before)):
        return Changes(
            {n: b for n, (a, b) in enumerate(zip(before, now)) if a is not b}, set(), [], 0
        )
    return Changes({}, set(), now[len(before) - dropped :], dropped)


def _begins_with(value: Any, before: list[Any]) -> bool:
    """Whether a new list has all items of the old one, and some more."""
    is_longer = isinstance(value, list) and value is not before and len(value) >= len(before)
    return is_longer and bool(before) and all(map(is_, value, before))


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def _is_state(value: Any, size: int) -> bool:
    """Whether all tensors in a value have a dimension of samples: a hidden state."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(size in tensor.shape for tensor in tensors)


def _are_collected(values: dict[int, Any], sizes: dict[int, int]) -> bool:
    """Whether new lists, sets and dicts hold what replicas have collected, and not their states."""
    kinds, first = {type(value) for value in values.values()}, next(iter(values.values()))
    if len(kinds) > 1 or not isinstance(first, (list, deque, set, dict)):
        return False
    if isinstance(first, dict):  # of other keys
        return len({key for each in values.values() for key in each}) == sum(
            map(len, values.values())
        )
    # [h, c] under a new key is a hidden state, one item is a first one
    return not all(len(v) > 1 and _is_state(list(v), sizes[i]) for i, v in values.items())


def _are_of_shards(before: Any, values: list[Any], sizes: list[int]) -> bool:
    """Whether what all replicas have assigned may not be the whole batch's.

    It differs, or it counts samples.
    """
    if any(value != values[0] for value in values if value == value):  # but NaN
        return True
    if not all(map(_is_number, values)) or not isinstance(values[0], int):
        return False
    if not _is_number(before):
        return values == sizes and values[0] > 1
    change = values[0] - before
    return change > 1 or (change < -1 and not any(change % size for size in sizes))


def _is_still(now: Any, base: Any) -> bool:
    """Whether a hook has left a value as it was, or has cut its graph off (truncated BPTT)."""
    if isinstance(now, Tensor) and isinstance(base, Tensor) and now.layout == torch.strided:
        return now.shape == base.shape and now.data_ptr() == base.data_ptr()
    if type(now) in (list, tuple) and type(now) is type(base) and len(now) == len(base):
        return all(map(_is_still, now, base))
    return now is base


def _has_graph(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(value))


def _detached(value: Any) -> Any:
    return apply_to_collection(value, Tensor, Tensor.detach) if _has_graph(value) else value


def _versions(value: Any) -> list[int]:
    """What changes when a tensor, an array, or one in a tuple, is edited in place."""
    if isinstance(value, np.ndarray):
        return [hash(value.tobytes())]
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
