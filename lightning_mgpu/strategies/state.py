"""What a step changes in Python: attributes, dicts, lists and sets. Every replica has its own.

Layers, and objects and containers that they hold, are found when a step begins, and copied for
every replica. A turn exchanges the `__dict__` of layers and objects. When all are through, what
replicas have changed is put together in the first one's, which are the user's:

| changed | afterwards |
| --- | --- |
| a key or an attribute that only some replicas have assigned or deleted | so for all |
| a number, text or `None` that every replica has assigned | the first one's |
| anything else that every replica has assigned: a hidden state | each its own, in its next step |
| items added to a list, a deque, a set, or by a `Counter` | all of them, in the order of the batch |

What may not be what one device would have is warned of by its name.
"""

import copy
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.split_batch import bring_home, send

TENSORS = ("_parameters", "_buffers", "_modules", "_flat_weights", "_device")  # of a layer
OF_MODULES = {*vars(LightningModule()), *TENSORS}  # no state of the user's
CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, Counter, set)
NUMBERS = (int, float, complex)
PLAIN = (*NUMBERS, str, bytes, type(None))
NO_STATE = (nn.Module, type, Enum, Optimizer, Trainer, Strategy, Callback, Dataset, DataLoader)
NO_STATE += (LightningDataModule, Logger, logging.Logger)
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


class State:
    """The namespaces and containers of k replicas. Those of the first are the user's."""

    def __init__(self, devices: Sequence[torch.device], notes: Notes) -> None:
        self.devices, self.notes = devices, notes
        self.kept: dict[Any, tuple[Any, dict[Any, tuple[Any, ...]]]] = {}  # see `_keep`
        self.clear()

    def clear(self) -> None:
        """Let go of all copies but of hidden states."""
        self.owners: list[Any] = []  # layers, then objects: the first namespaces are theirs
        self.stores: list[Any] = []  # namespaces, then containers
        self.places: list[
            tuple[int, Any]
        ] = []  # where each was found: the number of a store, a key
        self.links: list[tuple[int, Any, int]] = []  # a store, a key in it, and the store there
        self.own: list[list[Any]] = []  # by replica: its namespaces and containers
        self.start: list[list[Any]] = []  # the same, when the step began

    def begin(
        self, step: int, layers: Sequence[nn.Module], shared: Sequence[Any], others: Sequence[Any]
    ) -> None:
        """A step begins. `shared` are objects that stay one for all replicas, `others` do not."""
        self.clear()
        self.step = step
        others = [each for each in others if _store_of(each) is not None]
        self._find([*layers, *others], {id(each) for each in shared})
        self.own = [self.stores, *(self._copy_for(i) for i in range(1, len(self.devices)))]
        self.start = [[copy.copy(store) for store in stores] for stores in self.own]

    def _find(self, owners: Sequence[Any], shared: set[int]) -> None:
        found = [
            (vars(owner), owner, None, 0) for owner in owners
        ]  # store, owner, place, depth
        seen, links = {id(store) for store, *_ in found}, []
        for store, _, _, depth in found:  # which grows
            for key, value in _children(store) if depth < DEPTH else ():
                child = None if id(value) in shared else _store_of(value)
                if child is value:
                    links.append((id(store), key, id(value)))
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(
                        (child, None if child is value else value, (id(store), key), depth + 1)
                    )
        found.sort(key=lambda each: each[1] is None)  # containers come last
        self.stores = [store for store, *_ in found]
        self.owners = [owner for _, owner, *_ in found if owner is not None]
        number = {id(store): n for n, store in enumerate(self.stores)}
        self.places = [
            place and (number[place[0]], place[1]) for _, _, place, _ in found
        ]
        self.links = [(number[parent], key, number[child]) for parent, key, child in links]

    def _copy_for(self, i: int) -> list[Any]:
        """The namespaces and containers of replica i, with what it has kept of earlier steps."""
        copies = [copy.copy(store) for store in self.stores]
        for parent, key, child in self.links:
            copies[parent][key] = copies[child]
        home, device = self.devices[0], self.devices[i]
        for store, own in zip(self.stores, copies):
            if home != device and not isinstance(store, set) and len(store) <= FEW:
                for key, value in list(_items(own)):
                    if isinstance(value, (Tensor, tuple)):  # which a hook has put there
                        own[key] = send(value, home, device)
            kept = self.kept.get((self.step, i, id(store)))
            for key, (value, base, versions) in kept[1].items() if kept else ():
                if _get(store, key) is base and _versions(base) == versions:  # no hook changed it
                    own[key] = value
        return copies

    def combine(self, sizes: dict[int, int]) -> None:
        """The active replicas are through: put together what they have changed."""
        for n, store in enumerate(self.stores):
            if all(_is_same(self.start[i][n], self.own[i][n]) for i in sizes):
                continue
            changes = {
                i: _changes(self.start[i][n], self.own[i][n], size) for i, size in sizes.items()
            }
            if isinstance(store, set):
                store.update(*(change.added for change in changes.values()))
                store.difference_update(*(change.removed for change in changes.values()))
                continue
            if isinstance(store, (list, deque)):
                self._combine_items(n, changes, sizes)
            for key in dict.fromkeys(key for each in changes.values() for key in each.removed):
                store.pop(key, None)
            for key in dict.fromkeys(key for each in changes.values() for key in each.assigned):
                if not (n < len(self.owners) and key in TENSORS):
                    self._combine_values(n, key, changes, sizes)

    def _combine_values(
        self, n: int, key: Any, changes: dict[int, Changes], sizes: dict[int, int]
    ) -> None:
        store, before = self.stores[n], _get(self.start[0][n], key)
        values = {i: each.assigned[key] for i, each in changes.items() if key in each.assigned}
        given, home = list(values.values()), self.devices[0]
        is_number = all(isinstance(value, NUMBERS) for value in given)
        if isinstance(store, Counter):
            parts = [value - self.start[i][n].get(key, 0) for i, value in values.items()]
            store[key] = self.start[0][n].get(key, 0) + sum(parts)
        elif is_number and n < len(self.owners) and len(values) < len(sizes):
            self._warn_of_first(n, key)
        elif len(values) < len(sizes):  # the others have not touched it
            store[key] = bring_home(given[-1], home)
        elif all(isinstance(value, PLAIN) for value in given):
            if _are_of_shards(before, given, list(sizes.values())):
                self._warn_of_first(n, key)
        else:
            if key not in store:
                store[key] = bring_home(given[0], home)
            if all(isinstance(value, Tensor) and not value.ndim for value in given):
                self.notes.compare(self._first_stays(n, key), given)
            for i, value in values.items():
                if i:
                    self._keep(i, store, key, value)

    def _warn_of_first(self, n: int, key: Any) -> None:
        self.notes.warn(self._first_stays(n, key))

    def _first_stays(self, n: int, key: Any) -> str:
        return f"A step gives {self._name(n, key)} a value of its shard: the first replica's stays."

    def _keep(self, i: int, store: Any, key: Any, value: Any) -> None:
        """Keep replica i's value for its next such step, unless a hook assigns or edits the first's.

        What a training step has assigned, validation does not see.
        """
        base = _get(store, key)
        _, kept = self.kept.setdefault((self.step, i, id(store)), (store, {}))
        kept[key] = value, base, _versions(base)

    def _combine_items(self, n: int, changes: dict[int, Changes], sizes: dict[int, int]) -> None:
        """Replay on the first replica's list what the others have dropped and added."""
        store = self.stores[n]
        limit = store.maxlen if isinstance(store, deque) else None
        if limit is None and any(change.dropped for change in changes.values()):
            self.notes.warn(
                f"A step drops items from {self._name(n)}: which stay may depend on the number of "
                "devices. Collect them in a hook."
            )
        for i, change in changes.items():
            if i:
                for _ in range(min(change.dropped, len(store)) if limit is None else 0):
                    del store[0]
                store.extend(bring_home(change.added, self.devices[0]))

    def _name(self, n: int, *key: Any) -> str:
        """A namespace or container, or a value in it, as a message says it."""
        path = list(key)
        while place := self.places[n]:
            n, key = place
            path.insert(0, key)
        attribute, *keys = path
        return f"{attribute}{''.join(f'[{each!r}]' for each in keys)} of {type(self.owners[n]).__name__}"


def _children(store: Any) -> Iterator[tuple[Any, Any]]:
    """What may hold containers: values of a layer's own attributes, of a dict, and of a short list."""
    if isinstance(store, set) or (isinstance(store, (list, deque)) and len(store) > FEW):
        return
    is_namespace = "_modules" in store if isinstance(store, dict) else False
    for key, value in _items(store):
        if not isinstance(value, (Tensor, *PLAIN)) and not (is_namespace and key in OF_MODULES):
            yield key, value


def _store_of(value: Any) -> Any:
    """The container itself, or the namespace of an object. None if neither is the replicas' own."""
    if type(value) in CONTAINERS:
        return value if isinstance(value, (list, deque)) or len(value) <= MANY else None
    return vars(value) if _has_state(type(value)) and hasattr(value, "__dict__") else None


@cache
def _has_state(cls: type) -> bool:
    """Whether instances have a `__dict__` that a turn can exchange, and are nobody else's."""
    is_pythons = bool(cls.__flags__ & HEAP_TYPE) and bool(cls.__dictoffset__)
    return is_pythons and not issubclass(cls, NO_STATE) and isinstance(cls, type)


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
        assigned = {
            key: value for key, value in own.items() if start.get(key, MISSING) is not value
        }
        return Changes(assigned, start.keys() - own.keys(), [], 0)
    before, now = list(start), list(own)
    dropped = next((n for n, item in enumerate(before) if now and item is now[0]), len(before))
    is_in_place = any(map(is_, before, now)) or (dropped == len(before) and _are_states(now, size))
    if len(before) == len(now) and is_in_place:
        assigned = {n: item for n, item in enumerate(now) if item is not before[n]}
        return Changes(assigned, set(), [], 0)
    return Changes({}, set(), now[len(before) - dropped :], dropped)


def _are_states(items: list[Any], size: int) -> bool:
    return all(isinstance(each, Tensor) and each.ndim and len(each) == size for each in items)


def _are_of_shards(before: Any, values: list[Any], sizes: list[int]) -> bool:
    """Whether what all replicas have assigned may not be the whole batch's: it differs, or counts."""
    if any(value != values[0] for value in values if value == value):  # but NaN
        return True
    if not all(isinstance(value, NUMBERS) for value in (before, *values)):
        return False
    change = values[0] - before
    return bool(change > 1 and all(change % size == 0 for size in sizes if size > 1))


def _versions(value: Any) -> list[int]:
    """How often a tensor, or each in a tuple, was edited in place."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
