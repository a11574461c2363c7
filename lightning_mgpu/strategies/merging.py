"""Changes of Python objects by k replicas are put together in the first one's, the user's.

| changed | afterwards |
| --- | --- |
| a key or an attribute that only some replicas have assigned or deleted | so for all |
| a number, text or `None` that every replica has assigned | the first one's |
| anything else that every replica has assigned: a hidden state | each its own, in its next step |
| items added to a list, a deque, a set; what a `Counter` counts | all, in the batch's order |

A warning names each value that may differ from one device's.
"""

from collections import Counter, deque
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_mgpu.strategies.devices_and_attributes import MISSING
from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.split_batch import bring_home, leaves
from lightning_mgpu.strategies.state import (
    ARRAYS,
    PLAIN,
    TENSORS,
    Queue,
    State,
    get,
    holds_same_objects,
    versions_of,
)

NUMBERS = (int, float, complex)
# attributes of modules that are not the user's state: tensors, and what Lightning keeps by ids
LEFT_OUT = {*TENSORS, "_metric_attributes", "_param_requires_grad_state"}


class Longer(NamedTuple):
    """The items that a list has in addition to those of the list that it replaced."""

    items: list[Any]


class Changes(NamedTuple):
    """A replica's changes, in one step, of a namespace or a container."""

    assigned: dict[Any, Any]  # by key, or by index; a `Longer` for a list that has grown
    removed: set[Any]  # keys
    added: list[Any]  # items
    dropped: int  # how many items at the front


class Merger:
    """Puts the changes of replicas together."""

    def __init__(self, state: State, notes: Notes) -> None:
        self.state, self.notes = state, notes

    def changes(self, i: int) -> dict[int, Changes]:
        """What replica i's step has changed, by the number of the namespace or container."""
        state = self.state
        pairs = enumerate(zip(state.stores_at_start[i], state.stores[i]))
        changes = {n: _find_changes(*pair) for n, pair in pairs if _is_changed(*pair)}
        for n, key, value, versions in state.versions_at_start[i]:
            if get(state.stores[i][n], key) is value and versions_of(value) != versions:
                changes.setdefault(n, Changes({}, set(), [], 0)).assigned[key] = value
        for n in changes.keys() & range(len(state.owners)):
            for key in LEFT_OUT:
                changes[n].assigned.pop(key, None)
        return changes

    def combine(self, changes: Mapping[int, Mapping[int, Changes]], sizes: dict[int, int]) -> None:
        """Put together what replicas have changed, in the user's objects.

        Those have replica 0's changes already, if it is here.
        """
        for n in sorted({n for each in changes.values() for n in each}):
            store = self.state.holders[n].store
            by_replica = {i: each[n] for i, each in changes.items() if n in each}
            if self.state.first and 0 in by_replica:
                self._apply(n, by_replica[0])
            if isinstance(store, set):
                store.update(*(change.added for change in by_replica.values()))
                store.difference_update(*(change.removed for change in by_replica.values()))
                continue
            if isinstance(store, (list, deque)):
                self._combine_items(n, by_replica)
                if any(change.added for change in by_replica.values()):
                    continue
            for key in {key for each in by_replica.values() for key in each.removed}:
                store.pop(key, None)
            assigned: dict[Any, dict[int, Any]] = {}  # by key and replica
            for i, change in by_replica.items():
                for key, value in change.assigned.items():
                    assigned.setdefault(key, {})[i] = value
            for key, values in assigned.items():
                self._combine_values(n, key, values, sizes)

    def _apply(self, n: int, change: Changes) -> None:
        """Make the changes of the first of all replicas, which is in another process."""
        store, before = self.state.holders[n].store, self.state.home_at_start[n]
        if isinstance(store, (list, deque)):
            self._edit_items(store, change)
        for key, value in change.assigned.items():
            if isinstance(store, Counter):
                store[key] += value
            else:
                store[key] = _whole(value, get(before, key))

    def _combine_values(
        self, n: int, key: Any, values: dict[int, Any], sizes: dict[int, int]
    ) -> None:
        """Put together what replicas have assigned to an attribute, a key or an index."""
        store, before = self.state.holders[n].store, get(self.state.home_at_start[n], key)
        are_longer = all(isinstance(value, Longer) for value in values.values())
        if not are_longer:
            values = {i: _whole(value, before) for i, value in values.items()}
        given, sized, home = [*values.values()], [sizes[i] for i in values], self.state.devices[0]
        is_attribute, is_partial = n < len(self.state.owners), len(values) < len(sizes)
        if isinstance(store, Counter):
            store[key] += sum(count for i, count in values.items() if i)
        elif not is_attribute and before is MISSING and _are_collected(values, sizes):
            whole = given[0]
            for value in given[1:]:
                (whole.extend if hasattr(whole, "extend") else whole.update)(value)
            store[key] = bring_home(whole, home)
        elif are_longer:
            items = [item for each in given for item in bring_home(each.items, home)]
            store[key] = before + items
        elif is_partial:
            is_first = is_attribute and all(map(_is_number, given))
            if get(store, key) is MISSING or not is_first:
                store[key] = bring_home(given[-1], home)  # the others have not touched it
            is_first_only = self.state.meets and [*values] == [0]
            if all(map(_is_number, (before, *given))) and not is_first_only:
                self.notes.warn(self._first_stays(n, key))
        elif all(map(_is_plain, given)):
            if _are_of_shards(before, given, sized):
                self.notes.warn(self._first_stays(n, key))
        else:
            if get(store, key) is MISSING:
                store[key] = bring_home(given[0], home)
            self._note_values(self._first_stays(n, key), before, given, sized)
            for i, value in values.items():
                if i and (number := i - self.state.first) in range(len(self.state.devices)):
                    self.state.keep_hidden_state(number, store, key, value)

    def _note_values(self, message: str, before: Any, given: list[Any], sizes: list[int]) -> None:
        """Warn of values that look like results of a shard, not like hidden states of samples."""
        if all(isinstance(value, list) for value in given):
            if all(map(_is_plain, (item for value in given for item in value))):
                if any(value != given[0] for value in given):
                    self.notes.warn(message)
            elif any(len(value) < 2 or not _is_state(value, n) for value, n in zip(given, sizes)):
                self.notes.warn(message)
        if not all(isinstance(value, ARRAYS) for value in given):
            return
        tensors = [torch.as_tensor(value) for value in given]
        have_samples = all(size in tensor.shape for tensor, size in zip(tensors, sizes))
        if have_samples or any(tensor.layout != torch.strided for tensor in tensors):
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
        name = self.state.name_of(n, key)
        return f"A step gives {name} a value of its shard: the first replica's stays."

    def _combine_items(self, n: int, changes: dict[int, Changes]) -> None:
        """Drop from and add to the first replica's list as the others did to theirs."""
        store = self.state.holders[n].store
        if not _is_limited(store) and any(change.dropped for change in changes.values()):
            self.notes.warn(
                f"A step drops items from {self.state.name_of(n)}: which stay may depend on the "
                "number of devices. Collect them in a hook."
            )
        for i, change in changes.items():
            if i:
                self._edit_items(store, change)

    def _edit_items(self, store: Any, change: Changes) -> None:
        for _ in range(0 if _is_limited(store) else min(change.dropped, len(store))):
            del store[0]
        store.extend(bring_home(change.added, self.state.devices[0]))


def _is_changed(before: Any, now: Any) -> bool:
    return not holds_same_objects(before, now) or (isinstance(now, Queue) and bool(now.added))


def _find_changes(before: Any, now: Any) -> Changes:
    if isinstance(now, set):
        return Changes({}, before - now, list(now - before), 0)
    if isinstance(now, dict):
        new = {key: each for key, each in now.items() if before.get(key, MISSING) is not each}
        if isinstance(now, Counter):
            new = {key: count - before[key] for key, count in new.items()}
        for key, value in new.items():
            if _begins_with(value, old := before.get(key)):
                new[key] = Longer(value[len(old) :])
        return Changes(new, before.keys() - now.keys(), [], 0)
    if isinstance(now, Queue) and now.added and now.maxlen is not None:
        return Changes({}, set(), now.added, 0)
    before, now = list(before), list(now)
    moved = {id(item): n for n, item in reversed([*enumerate(before)]) if not _is_plain(item)}
    dropped = moved.get(id(now[0]), len(before)) if now else len(before)
    dropped = 0 if before and now and before[0] is now[0] else dropped
    if len(before) == len(now) and dropped in (0, len(before)):
        new = {n: b for n, (a, b) in enumerate(zip(before, now)) if a is not b}
        return Changes(new, set(), [], 0)
    return Changes({}, set(), now[len(before) - dropped :], dropped)


def _begins_with(value: Any, before: Any) -> bool:
    """Whether a new list has all items of the old one, and some more."""
    if not (isinstance(value, list) and isinstance(before, list)) or value is before:
        return False
    return len(value) >= len(before) > 0 and all(map(is_, value, before))


def _whole(value: Any, before: Any) -> Any:
    return before + value.items if isinstance(value, Longer) else value


def _is_limited(store: Any) -> bool:
    return isinstance(store, deque) and store.maxlen is not None


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
    types, first = {type(value) for value in values.values()}, next(iter(values.values()))
    if len(types) > 1 or not isinstance(first, (list, deque, set, dict)):
        return False
    if isinstance(first, dict):  # of other keys
        keys = [key for each in values.values() for key in each]
        return len({*keys}) == len(keys)
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
