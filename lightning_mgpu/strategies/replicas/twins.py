"""What a replica has in the place of something of the original's: its own layers, and what is made of them.

Lists, dicts, sets and tuples are copied, with what is in them. Methods of layers become methods of the replica's, also
inside `functools.partial`, and so do functions inside a method that use `self`. An object that is an attribute or
holds layers gives way to the copy that was made with the replica, whose attributes are treated alike. Tensors are
copied to the replica's device; one its own step has put in the same place stays, until somebody else changes the
original's, and so does an object. A random generator has a stream of its own in every replica. Everything else is the
thing itself, if it can be used on the replica's device (`elsewhere.py`).
"""

import copy
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mgpu.strategies.replicas.elsewhere import NEVER_COPIED, Elsewhere, follow_tensor
from lightning_mgpu.strategies.replicas.values import (
    CONTAINERS,
    FOLLOWED,
    MAX_ITEMS,
    NO_OBJECTS,
    PLAIN,
    REBUILT,
    attributes_of,
    contents_of,
    copy_to,
    is_looked_into,
    is_object,
    items_in,
    num_items,
    parts_of,
    set_attribute,
    version_of,
)


class Twins:
    """The replica's own of what the original has.

    Args:
        layers: Parameters and layers of the replica, by the `id` of what they are copies of.
        device: The replica's.
        index: Its number, by which its random generators are seeded.
        home: The original's device; `device` if it is left out.
    """

    def __init__(
        self, layers: dict[int, Any], device: torch.device, index: int, home: torch.device | None = None
    ) -> None:
        self.of, self.device, self.index = layers, device, index
        self.elsewhere = Elsewhere(layers, home or device, device, self.own)
        # By id: an original, its copy, its length when copied, or what was in a dict then
        self.copied: dict[int, tuple[Any, Any, Any]] = {}
        self.ends: dict[int, tuple[Any, Any]] = {}  # by the id of an original list: its copy's first and last item then
        self._objects: list[tuple[Any, Any]] = []  # others, held here: an `id` may become another's
        # A tensor or generator, its version, the replica's own; in this step, and in the one before
        self._kept: dict[int, tuple[Any, int, Any]] = {}
        self._kept_before: dict[int, tuple[Any, int, Any]] = {}
        self._rebinding: set[int] = set()
        # An object a step has made, and the one it made of the replica's shard
        self._made: dict[int, tuple[Any, Any]] = {}
        self._made_before: dict[int, tuple[Any, Any]] = {}
        # When this step began, by id: objects that both had, and what was in those that a step had made
        self._shared: dict[int, Any] = {}
        self._then: dict[int, dict[str, tuple[Any, int]]] = {}
        self._catches_up = False

    def find(self, value: Any, copied: Any, visited: dict[int, bool]) -> bool:
        """Whether there are layers in a value; objects in which there are get a twin, the copy in the replica.

        Args:
            value: The original's.
            copied: What was made of it with the replica.
            visited: The answer for what was looked at already, by `id`.
        """
        if id(value) in self.of:
            return True
        if value is copied or type(value) is not type(copied) or id(value) in visited:
            return visited.get(id(value), False)
        visited[id(value)] = False  # for cycles
        if isinstance(value, torch.Generator):
            copied.manual_seed(value.initial_seed() + self.index)
        holds = isinstance(value, (nn.Module, nn.Parameter))
        for part, its_copy in parts_of(value, copied):
            holds |= self.find(part, its_copy, visited)
        visited[id(value)] = holds
        if holds and not isinstance(value, (*CONTAINERS, tuple)):
            self.add(value, copied)
        return holds

    def add(self, value: Any, copied: Any) -> None:
        """Let a value have a twin, and the objects in it, too."""
        self.of[id(value)] = copied
        self._objects.append((value, copied))
        for name, part in contents_of(value):
            its_copy = attributes_of(copied).get(name)
            may_have_one = is_object(part) and not isinstance(part, (MethodType, partial, Tensor))
            if may_have_one and its_copy is not part and type(its_copy) is type(part) and id(part) not in self.of:
                self.add(part, its_copy)

    def add_objects(self, value: Any, copied: Any, visited: set[int]) -> None:
        """Let an object have a twin, and those in a list, tuple or dict, or whose method it is."""
        if value is copied or type(value) is not type(copied) or id(value) in self.of or id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, (*CONTAINERS, tuple)) and num_items(value) <= MAX_ITEMS:
            for part, its_copy in () if isinstance(value, set) else parts_of(value, copied):
                self.add_objects(part, its_copy, visited)
        elif isinstance(value, MethodType):
            self.add_objects(value.__self__, copied.__self__, visited)
        elif not isinstance(value, (*NO_OBJECTS, *CONTAINERS, tuple, *REBUILT, *PLAIN)):
            self.add(value, copied)

    def shares_layers(self, value: Any, visited: set[int]) -> bool:
        """Whether a value is, or holds in lists and dicts, an object without a twin that leads to layers with one."""
        is_known = id(value) in self.of or id(value) in visited
        if is_known or isinstance(value, (*NO_OBJECTS, *REBUILT, *PLAIN, *FOLLOWED)):
            return False
        if isinstance(value, (*CONTAINERS, tuple)):
            visited.add(id(value))
            return any(self.shares_layers(part, visited) for _, part in items_in(value))
        return self._leads_to_layers(value, visited)

    def _leads_to_layers(self, value: Any, visited: set[int]) -> bool:
        todo = [value]
        while todo:
            part = todo.pop()
            part = part() if isinstance(part, weakref.ref) else part
            if id(part) in self.of:
                return True
            is_long = isinstance(part, (*CONTAINERS, tuple)) and not is_looked_into(part)
            if not is_long and id(part) not in visited and not isinstance(part, (*PLAIN, *FOLLOWED, Tensor, nn.Module)):
                visited.add(id(part))
                todo += [inner for inner, _ in parts_of(part, part)]
        return False

    @torch.no_grad()
    def refresh(self) -> None:
        """Give objects what their originals have; begin a new step.

        Layers among them, an average of the weights say, are not registered with the module: nobody else does.
        """
        self.copied, self.ends, self._shared, self._then = {}, {}, {}, {}
        self._kept, self._kept_before = {}, self._kept
        self._made, self._made_before = {}, self._made
        self.elsewhere.begin_step()
        for value, copied in self._objects:
            if isinstance(value, nn.Parameter):
                follow_tensor(copied, value, self.elsewhere.place(value))
            elif isinstance(value, nn.Module):
                vars(copied).update({name: part for name, part in vars(value).items() if isinstance(part, PLAIN)})
                for name, tensor in value._buffers.items():
                    if tensor is not None:
                        copied._buffers[name] = tensor.to(self.elsewhere.place(tensor), copy=True)
            for name, part in contents_of(value):
                set_attribute(copied, name, self.own(part))

    def own(self, value: Any) -> Any:
        """The replica's own; the value itself, where nothing in it is the replica's."""
        if isinstance(value, PLAIN):
            return value
        if id(value) in self.of:
            return self.of[id(value)]
        if (made := self._made.get(id(value)) or self._made_before.get(id(value))) is not None:
            self._made[id(value)] = made
            if not self._catches_up:
                self._then[id(value)] = {name: (part, version_of(part)) for name, part in contents_of(value)}
            return made[1]
        if isinstance(value, CONTAINERS):
            return self._copy(value)
        if isinstance(value, (Tensor, torch.Generator)):
            nothing = None, 0, None
            known, version, own = self._kept.get(id(value)) or self._kept_before.get(id(value), nothing)
            if isinstance(value, torch.Generator):
                own = self._stream(value, own)
            elif known is not value or version != version_of(value):
                own = copy_to(value, self.elsewhere.place(value))
            self._kept[id(value)] = value, version_of(value), own  # it may be there under another name, too
            return own
        if isinstance(value, tuple) and is_looked_into(value):
            items = [self.own(item) for item in value]
            if all(own is item for own, item in zip(items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, MethodType):
            owner = self.own(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, weakref.ref):
            return weakref.ref(self.of[id(value())]) if id(value()) in self.of else value
        if isinstance(value, partial):
            parts = (value.func, *value.args, *value.keywords.values())
            if (own := self.own(parts)) is parts:
                return value
            function, *rest = own
            args, keywords = rest[: len(value.args)], dict(zip(value.keywords, rest[len(value.args) :]))
            return partial(function, *args, **keywords)
        if isinstance(value, FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return self._rebound(value)
        if self._catches_up and id(value) not in self._shared:
            return self._copied_object(value)
        self._shared[id(value)] = value
        return self.elsewhere.brought(value)

    def keep(self, places: Iterable[tuple[Any, Any]]) -> None:
        """Remember which tensors, generators and other objects the replica has at the end of a step, not the original.

        Args:
            places: Values of the original, and the replica's own.
        """
        self._kept, self._made = {}, {}
        visited: set[int] = set()
        todo = list(places)
        held = [*self._objects, *self.elsewhere.late.values()]
        todo += [(part, attributes_of(copied).get(name)) for value, copied in held for name, part in contents_of(value)]
        while todo:
            value, own = todo.pop()
            if value is own or type(value) is not type(own) or id(value) in visited:
                continue
            visited.add(id(value))
            if isinstance(value, (Tensor, torch.Generator)):
                self._kept[id(value)] = value, version_of(value), own
            elif isinstance(value, dict) and len(value) <= MAX_ITEMS:
                todo += [(item, own[key]) for key, item in value.items() if key in own]
            elif (
                isinstance(value, (list, tuple, deque))
                and num_items(value) <= MAX_ITEMS
                and not getattr(value, "maxlen", None)
            ):
                _, copied, length = self.copied.get(id(value), (None, None, MAX_ITEMS))
                length = length if copied is own else MAX_ITEMS
                todo += list(zip(value, own))[:length]  # what was added has no place yet
            elif (
                id(value) not in self.of
                and id(value) not in self.elsewhere.late
                and not isinstance(value, (*PLAIN, *CONTAINERS, tuple, *REBUILT))
            ):
                self._made[id(value)] = value, own

    def catch_up(self, values: Iterable[Any]) -> None:
        """Copy objects and arrays which the original has made or changed in a step that the replica had no part in.

        New ones would be shared like those of hooks, and the next step change them in two threads.
        """
        self.copied, self._catches_up = {}, True
        try:
            for value in [*values, *(part for known, _ in self._objects for _, part in contents_of(known))]:
                self.own(value)
            for key, then in self._then.items():
                value, own = self._made.get(key, (None, None))
                for name, part in contents_of(value):
                    if name not in then or then[name][0] is not part or then[name][1] != version_of(part):
                        set_attribute(own, name, self.own(part))
        finally:
            self._catches_up = False

    def _copied_object(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray)
        if isinstance(value, (*NEVER_COPIED, nn.Module)) or not (is_array or is_object(value)):
            return value
        try:
            own = copy.copy(value)
        except Exception:  # what cannot be copied is shared
            return value
        if own is not value:
            self._made[id(value)] = value, own
            for name, part in contents_of(value):
                set_attribute(own, name, self.own(part))
        return own

    def _copy(self, value: Any) -> Any:
        if id(value) in self.copied:  # under two names
            return self.copied[id(value)][1]
        copied = deque(value) if type(value) is deque else copy.copy(value)  # one without `maxlen` forgets nothing
        then = _as_it_is(value) if isinstance(value, dict) else len(value)
        self.copied[id(value)] = value, copied, then
        is_long = not is_looked_into(value)
        for key, item in self.elsewhere.items_in(value) if is_long else items_in(value):
            own = self.elsewhere.moved(item) if is_long and isinstance(item, Tensor) else self.own(item)
            if own is not item:
                copied[key] = own
        if isinstance(value, (list, deque)) and copied:
            self.ends[id(value)] = copied[0], copied[-1]
        return copied

    def _stream(self, original: torch.Generator, own: torch.Generator | None) -> torch.Generator:
        """A generator seeded with the original's seed and the replica's number, anew whenever the original is."""
        seed = original.initial_seed()
        fresh = torch.Generator(original.device).manual_seed(seed)
        if own is None:
            own = torch.Generator(original.device if original.device.type == "cpu" else self.device)
            own.manual_seed(seed + self.index)
        elif torch.equal(original.get_state(), fresh.get_state()):
            own.manual_seed(seed + self.index)
        return own

    def _rebound(self, function: FunctionType) -> FunctionType:
        """The function, with the replica's layers among the variables it has taken from around it, and its defaults."""
        if id(function) in self._rebinding:  # it knows itself
            return function
        cells, keywords = function.__closure__ or (), function.__kwdefaults__ or {}
        around = [None if cell == CellType() else cell.cell_contents for cell in cells]
        parts = [*around, *keywords.values(), *(function.__defaults__ or ())]
        self._rebinding.add(id(function))
        try:
            owns = [self._own_part(part) for part in parts]
        finally:
            self._rebinding.remove(id(function))
        if all(own is part for own, part in zip(owns, parts)):
            return function
        closure = tuple(cell if own is part else CellType(own) for cell, part, own in zip(cells, around, owns))
        defaults = tuple(owns[len(cells) + len(keywords) :])
        copied = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
        copied.__kwdefaults__ = dict(zip(keywords, owns[len(cells) :]))
        vars(copied).update(vars(function))
        return copied

    def _own_part(self, value: Any) -> Any:
        """The replica's layer, or a method or function made of it; numbers, lists and objects stay what they are."""
        own = self.of.get(id(value), value)
        if own is value and isinstance(value, Tensor):
            return self.elsewhere.moved(value)
        if own is value and isinstance(value, (*CONTAINERS, tuple)) and self.elsewhere.is_there:
            return self.own(value) if self.elsewhere.has_tensors_of(value) else value
        if own is value and not isinstance(value, (*PLAIN, *REBUILT)):
            return self.elsewhere.brought(value)
        return self.own(value) if isinstance(value, (MethodType, FunctionType, partial)) else own


def _as_it_is(items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict with what is in it now; what a Counter counts with `+=`, tensors too, changes in place."""
    if not isinstance(items, Counter):
        return dict(items)
    return {key: count.clone() if isinstance(count, Tensor) else count for key, count in items.items()}
