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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
CONTAINERS = (list, tuple, deque, dict, OrderedDict, defaultdict, Counter, set, SimpleNamespace)
ARRAYS = (Tensor, np.ndarray)
NUMBERS = (int, float, complex)
PLAIN = (*NUMBERS, str, bytes, type(None))
NO_STATE: tuple[type, ...] = (nn.Module, type, Enum, Optimizer, Trainer, Strategy, Callback)
NO_STATE += (Dataset, DataLoader, LightningDataModule, Logger, logging.Logger, threading.local)
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Thread)
DEPTH = 4  # containers in containers
MANY = 1000  # a larger dict or set is one for all replicas
FEW = 100  # in larger lists no containers are looked for
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
                    place, is_owner = (id(parent.store), key), type(value) not in CONTAINERS
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

    def begin(self, step: int) -> None:
        """A step begins: give every replica its own."""
        self.step = step
        first = [each.store for each in self._found]
        self.own = [first, *(self._copy_for(i) for i in range(1, len(self.devices)))]
        self._start = [[copy.copy(store) for store in stores] for stores in self.own]
        self._versions = [
            [(n, key, stores[n][key], _versions(stores[n][key])) for n, key in self._arrays]
            for stores in self.own
        ]

    def _copy_for(self, i: int) -> list[Any]:
        """The namespaces and containers of replica i, with what it has kept of earlier steps."""
        values = [copy.copy(each.store if each.is_owner else each.value) for each in self._found]
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
                is_current = _get(each.store, key) is base and _versions(base) == versions
                if is_current:  # no hook has changed it
                    own[key] = value
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
        store, before, given = (
            self._found[n].store,
            _get(self._start[0][n], key),
            [*values.values()],
        )
        is_attribute, is_partial = n < len(self.owners), len(values) < len(sizes)
        if isinstance(store, Counter):
            store[key] += sum(count for i, count in values.items() if i)
        elif not is_attribute and before is MISSING and _are_collected(values, sizes):
            whole = given[0]
            for value in given[1:]:
                (whole.extend if hasattr(whole, "extend") else whole.update)(value)
            store[key] = bring_home(whole, self.devices[0])
        elif is_partial and not (is_attribute and all(map(_is_number, given))):
            store[key] = bring_home(given[-1], self.devices[0])  # the others have not touched it
        elif all(isinstance(value, PLAIN) for value in given):
            if isinstance(store, dict):
                store.setdefault(key, given[0])
            if is_partial or _are_of_shards(before, given, [*sizes.values()]):
                self.notes.warn(self._first_stays(n, key))
        else:
            if _get(store, key) is MISSING:
                store[key] = bring_home(given[0], self.devices[0])
            if _are_values(given, [*sizes.values()]):
                self.notes.compare(self._first_stays(n, key), list(map(torch.as_tensor, given)))
            for i, value in values.items():
                if i:
                    self._keep(i, store, key, value)

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
    if isinstance(store, set) or (isinstance(store, (list, deque)) and len(store) > FEW):
        return
    is_namespace = isinstance(store, dict) and "_modules" in store
    if is_namespace and "dynamo_ctx" in store:  # of a compiled module: torch's own
        return
    for key, value in _items(store):
        if not isinstance(value, PLAIN) and not (is_namespace and key in OF_MODULES):
            yield key, value


def _is_array(value: Any) -> bool:
    return isinstance(value, ARRAYS)


def _store_of(value: Any) -> Any:
    """The container itself, or the namespace of an object. None if neither is the replicas' own."""
    if type(value) is tuple:
        return value if any(_store_of(item) is not None for item in value) else None
    if type(value) in CONTAINERS:
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
    if len(own) > MANY:  # only its ends, which is where items come and go
        return start[0] is own[0] and start[-1] is own[-1]
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
    dropped = next((n for n, item in enumerate(before) if now and item is now[0]), len(before))
    is_in_place = any(map(is_, before, now)) or (dropped == len(before) and _are_states(now, size))
    if len(before) == len(now) and is_in_place:
        assigned = {n: item for n, item in enumerate(now) if item is not before[n]}
        return Changes(assigned, set(), [], 0)
    return Changes({}, set(), now[len(before) - dropped :], dropped)


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def _are_states(items: list[Any], size: int) -> bool:
    return all(isinstance(each, Tensor) and each.ndim and len(each) == size for each in items)


def _are_values(values: list[Any], sizes: list[int]) -> bool:
    """Whether tensors are of one shape in which no dimension is the samples': no hidden states."""
    if not all(
        _is_array(value) and getattr(value, "is_sparse", False) is False for value in values
    ):
        return False
    is_of_samples = any(size in value.shape for value, size in zip(values, sizes))
    return len({(value.shape, value.dtype) for value in values}) == 1 and not is_of_samples


def _are_collected(values: dict[int, Any], sizes: dict[int, int]) -> bool:
    """Whether new lists, sets and dicts hold what replicas have collected, and not their states."""
    kinds, first = {type(value) for value in values.values()}, next(iter(values.values()))
    if len(kinds) > 1 or not isinstance(first, (list, deque, set, dict)):
        return False
    if isinstance(first, dict):  # of other keys
        return len({key for each in values.values() for key in each}) == sum(
            map(len, values.values())
        )
    return isinstance(first, set) or not all(_are_states(v, sizes[i]) for i, v in values.items())


def _are_of_shards(before: Any, values: list[Any], sizes: list[int]) -> bool:
    """Whether what all replicas have assigned may not be the whole batch's.

    It differs, or it counts samples.
    """
    if any(value != values[0] for value in values if value == value):  # but NaN
        return True
    if not all(isinstance(value, NUMBERS) for value in (before, *values)):
        return False
    change = values[0] - before
    return bool(change > 1 and all(change % size == 0 for size in sizes if size > 1))


def _versions(value: Any) -> list[int]:
    """What changes when a tensor, an array, or one in a tuple, is edited in place."""
    if isinstance(value, np.ndarray):
        return [hash(value.tobytes())]
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
