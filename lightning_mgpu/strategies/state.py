"""Attributes, dicts, lists, sets and tensors in Python objects. Every replica has its own.

Layers, and objects and containers that they hold, are found when a step begins, and copied for
every replica. A turn exchanges the `__dict__` of layers and objects. `merging.py` puts the changes
of a step together.
"""

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

from lightning_mgpu.strategies.devices_and_attributes import MISSING
from lightning_mgpu.strategies.split_batch import leaves, send

OF_RECURRENT_LAYERS = ("_flat_weights", "_flat_weight_refs")
TENSORS = ("_parameters", "_buffers", "_modules", "_device", *OF_RECURRENT_LAYERS)
OF_MODULES = {*vars(LightningModule()), *TENSORS}  # no state of the user's
CONTAINERS = (list, deque, dict, set, SimpleNamespace)
ARRAYS = (Tensor, np.ndarray)
PLAIN = (int, float, complex, str, bytes, type(None))
NO_STATE: tuple[type, ...] = (Tensor, nn.Module, type, Enum, Optimizer, Trainer, Strategy)
NO_STATE += (Callback, Dataset, DataLoader, LightningDataModule, Logger, logging.Logger)
NO_STATE += (threading.local,)
LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Thread)
DEPTH = 4  # containers in containers
MANY = 1000  # a larger dict or set is one for all replicas
FEW = 100  # in larger containers nothing is looked for
HEAP_TYPE = 1 << 9  # CPython's flag of classes that were written in Python


class Holder(NamedTuple):
    """A layer, an object or a container of which each replica has a copy."""

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
    """The namespaces and containers of replicas, of which `first` is the number of the first.

    Those of replica 0 are the user's. In a process without it, every replica has copies.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        localize: Callable[[dict[str, Any], int], None],
        first: int = 0,
    ) -> None:
        self.devices, self.first = devices, first
        self.localize = localize  # puts replica i's tensors into the namespace of a layer
        # see `keep_hidden_state`
        self.hidden_states: dict[Any, tuple[Any, dict[Any, tuple[Any, ...]]]] = {}
        self.clear()

    def clear(self) -> None:
        """Let go of all copies, except hidden states."""
        self.holders: list[Holder] = []
        self._links: list[tuple[int, Any, int]] = []  # a store, a key, the container there
        self._arrays: list[tuple[int, Any]] = []  # a store, and a key of tensors or arrays in it
        self.modules: list[tuple[str, nn.Module]] = []  # that no layer holds as such
        self.owners: list[Any] = []  # layers, then objects: the first namespaces are theirs
        self.home: list[Any] = []  # the user's: namespaces, then containers
        self.stores: list[list[Any]] = []  # the same, by replica
        self.stores_at_start: list[list[Any]] = []  # the same, when the step began
        self.home_at_start: list[Any] = []
        self._stores_at_find: list[Any] = []  # the first replica's, as `find` has found them
        self._large: list[Any] = []  # dicts and sets that are one for all replicas

    def find(self, layers: Sequence[Any], shared: Sequence[Any], others: Sequence[Any]) -> None:
        """Find every namespace and container once, from the layers and `others` on, and metrics.

        `shared` are objects that stay one for all replicas.
        """
        self.clear()
        holders = [Holder(owner, vars(owner)) for owner in (*layers, *others)]
        seen = {id(each.store) for each in holders} | {id(vars(each)) for each in shared}
        links: list[tuple[int, Any, int]] = []
        arrays: list[tuple[int, Any]] = []
        for parent in holders:  # which grows
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
                        holders.append(Holder(value, store, place, parent.depth + 1, is_owner))
                elif isinstance(value, tuple) and any(map(_is_array, leaves(value))):
                    arrays.append((id(parent.store), key))
                elif _is_large(value):
                    self._large.append(value)
        self.holders = sorted(holders, key=lambda each: not each.is_owner)
        self._number = {id(each.store): n for n, each in enumerate(self.holders)}
        self._links = [(self._number[a], key, self._number[b]) for a, key, b in links]
        self._arrays = [(self._number[store], key) for store, key in arrays]
        self.owners = [each.value for each in self.holders if each.is_owner]
        self._stores_at_find = [shallow_copy(each.store) for each in self.holders]

    def is_as_found(self) -> bool:
        """Whether nothing that `find` looks at has changed since: it would find the same."""
        if not all(map(_is_large, self._large)):
            return False
        for n, (value, store, *_, is_owner) in enumerate(self.holders):
            if is_owner and vars(value) is not store:
                return False
            before = self._stores_at_find[n]
            if not holds_same_objects(before, store):
                if _looked_at(before) != _looked_at(store) or _is_large(store):
                    return False
                self._stores_at_find[n] = shallow_copy(store)
        return True

    def begin(self, step: int, meets: bool) -> None:
        """A step begins, in which replicas may meet: copy the first one's state for the others."""
        self.step, self.meets = step, meets
        # what hooks have replaced is let go of
        self.hidden_states = {
            key: hidden
            for key, hidden in self.hidden_states.items()
            if key[0] != step or key[2] in self._number
        }
        self.home = [each.store for each in self.holders]
        self.stores = [
            self._copy_for(i) if self.first + i else self.home for i in range(len(self.devices))
        ]
        self.stores_at_start = [[shallow_copy(each) for each in stores] for stores in self.stores]
        self.home_at_start = self.stores_at_start[0]
        if self.first:
            self.home_at_start = [shallow_copy(each) for each in self.home]
        self.versions_at_start = [
            [(n, key, stores[n][key], versions_of(stores[n][key])) for n, key in self._arrays]
            for stores in self.stores
        ]

    def _copy_for(self, i: int) -> list[Any]:
        """The namespaces and containers of replica i, with its hidden states of earlier steps."""
        values = [copy.copy(each.store if each.is_owner else each.value) for each in self.holders]
        values = [Queue(each, each.maxlen) if type(each) is deque else each for each in values]
        stores = [_namespace(value) for value in values]
        memo: dict[int, Any] = {}  # tensors that are the same stay the same
        for n, key in self._arrays:
            if not isinstance(stores[n], tuple):
                stores[n][key] = self._copy_array(stores[n][key], i, memo)
        for each, store in zip(self.holders, stores):
            if isinstance(each.value, nn.Module):
                self.localize(store, i)
        for parent, key, child in reversed(self._links):  # a tuple is complete before its parent
            if isinstance(parent_store := stores[parent], tuple):
                items = (*parent_store[:key], values[child], *parent_store[key + 1 :])
                stores[parent] = values[parent] = items
            else:
                parent_store[key] = values[child]
        for each, store in zip(self.holders, stores):
            hidden = self.hidden_states.get((self.step, i, id(each.store)))
            for key, (value, base, versions) in hidden[1].items() if hidden else ():
                now = get(each.store, key)
                if _is_still(now, base) and versions_of(now) == versions:  # no hook has changed it
                    store[key] = value if _has_graph(now) else _detached(value)
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

    def keep_hidden_state(self, i: int, store: Any, key: Any, value: Any) -> None:
        """Keep replica i's value for its next such step, unless a hook edits the first one's.

        Validation does not see the values that a training step has assigned.
        """
        base = get(store, key)
        _, hidden = self.hidden_states.setdefault((self.step, i, id(store)), (store, {}))
        hidden[key] = value, base, versions_of(base)

    def name_of(self, n: int, *key: Any) -> str:
        """A namespace or container, or a value in it, as a message says it."""
        path = list(key)
        while place := self.holders[n].place:
            n, key_there = self._number[place[0]], place[1]
            path.insert(0, key_there)
        attribute, *keys = path
        owner = type(self.holders[n].value).__name__
        return f"{attribute}{''.join(f'[{each!r}]' for each in keys)} of {owner}"


def _children(store: Any) -> list[tuple[Any, Any]]:
    """Values that may hold containers, with their keys: of a namespace, a dict, a short list."""
    is_namespace = isinstance(store, dict) and "_modules" in store
    if isinstance(store, set) or (len(store) > FEW and not is_namespace):
        return []
    if is_namespace and "dynamo_ctx" in store:  # of a compiled module: torch's own
        return []
    keys_of_torch = OF_MODULES if is_namespace else ()
    return [
        (key, value)
        for key, value in _items(store)
        if key not in keys_of_torch and not isinstance(value, PLAIN)
    ]


def _looked_at(store: Any) -> list[Any]:
    """All that `find` looks at in a namespace or container: keys, and types or ids of values."""
    return [(key, type(v) if isinstance(v, ARRAYS) else id(v)) for key, v in _children(store)]


def shallow_copy(store: Any) -> Any:
    """A shallow copy of a namespace or a container. A deque's is a list."""
    if type(store) in (dict, list, set):
        return store.copy()
    return list(store) if isinstance(store, deque) else copy.copy(store)


def holds_same_objects(before: Any, now: Any) -> bool:
    """Whether a namespace or a container holds the very objects that its copy holds."""
    if isinstance(now, set):
        return bool(before == now)
    if len(before) != len(now):
        return False
    if isinstance(now, dict):
        return all(map(is_, before.values(), now.values())) and all(map(is_, before, now))
    return all(map(is_, before, now))


def _is_array(value: Any) -> bool:
    return isinstance(value, ARRAYS)


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS) or type(value) is tuple


def _store_of(value: Any) -> Any:
    """The container itself, or an object's namespace. None if it is one for all replicas."""
    if type(value) is tuple:
        return value if any(_store_of(item) is not None for item in value) else None
    if _is_container(value):
        return None if _is_large(value) or not _can_be_copied(value) else _namespace(value)
    if not _has_state(type(value)):  # type: ignore[arg-type]
        return None
    is_of_threads = any(isinstance(each, LOCKS) for each in vars(value).values())
    return None if is_of_threads else vars(value)  # which other threads may write into


def _is_large(value: Any) -> bool:
    return isinstance(value, (dict, set)) and len(value) > MANY


def _can_be_copied(value: Any) -> bool:
    """Whether a container of a class of the user's takes part in `copy.copy`."""
    if type(value) in CONTAINERS:
        return True
    try:
        return type(copy.copy(value)) is type(value)
    except Exception:
        return False


def _namespace(value: Any) -> Any:
    return vars(value) if isinstance(value, SimpleNamespace) else value  # which has no other one


@cache
def _has_state(cls: Any) -> bool:
    """Whether instances have a `__dict__` that a turn can exchange, and belong to the user."""
    is_pythons = cls.__flags__ & HEAP_TYPE and cls.__dictoffset__ and not hasattr(cls, "__next__")
    has_property = any(isinstance(vars(each).get("__dict__"), property) for each in cls.__mro__)
    return bool(is_pythons) and not has_property and not issubclass(cls, NO_STATE)


def _items(store: Any) -> Any:
    return store.items() if isinstance(store, dict) else enumerate(store)


def get(store: Any, key: Any) -> Any:
    if isinstance(store, dict):
        return store.get(key, MISSING)
    return store[key] if key < len(store) else MISSING


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


def versions_of(value: Any) -> list[int]:
    """Numbers that change when a tensor, an array, or one in a tuple, is edited in place."""
    if isinstance(value, np.ndarray):
        return [hash(value.tobytes())]
    tensors = value if isinstance(value, tuple) else (value,)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
