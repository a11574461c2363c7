"""Nestings of lists, tuples, dicts and dataclasses: what is in them, and the same ones with something else in them."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def leaves(part: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Everything in a nesting of lists, tuples, dicts and dataclasses that is none of these.

    A container that lies inside itself is entered once; `around` are the ids of those that `part` lies in.
    """
    if not isinstance(part, (Mapping, list, tuple)) and not is_dataclass_instance(part):
        yield part
    elif id(part) not in around:
        for item in children(part):
            yield from leaves(item, (*around, id(part)))


def map_items(part: Any, function: Callable[[Any], Any]) -> Any:
    """The same container with the function applied to what is directly inside."""
    if isinstance(part, Mapping):
        return with_items(part, {key: function(part[key]) for key in part.keys()})  # noqa: SIM118
    if isinstance(part, (list, tuple)):
        return like(part, [function(item) for item in part])
    if is_dataclass_instance(part):
        return with_fields(part, {field.name: function(getattr(part, field.name)) for field in fields(part)})
    return part


def like(sequence: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the same type with other items."""
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def with_items(part: Mapping, items: dict[Any, Any]) -> Any:
    is_copied = isinstance(part, (dict, UserDict)) or hasattr(part, "__copy__")  # else a copy may share what is inside
    if not is_copied or not hasattr(part, "__setitem__"):
        return type(part)(items)  # type: ignore[call-arg]
    changed: Any = copy.copy(part)
    for key, value in items.items():
        changed[key] = value
    return changed


def with_fields(part: Any, values: dict[str, Any]) -> Any:
    changed = copy.copy(part)
    for name, value in values.items():
        object.__setattr__(changed, name, value)  # frozen ones too
    return changed


def is_dataclass_instance(part: Any) -> bool:
    return is_dataclass(part) and not isinstance(part, type)


def is_tensordict(part: Any) -> bool:
    """A TensorDict or tensorclass with batch dimensions: indexed and concatenated like a tensor."""
    return hasattr(type(part), "batch_size") and isinstance(part.batch_size, torch.Size) and len(part.batch_size) > 0


def children(part: Any) -> Iterator[Any]:
    """What is directly inside a list, tuple, dict or dataclass."""
    if isinstance(part, Mapping):
        yield from part.values()
    elif isinstance(part, (list, tuple)):
        yield from part
    elif is_dataclass_instance(part):
        yield from (getattr(part, field.name) for field in fields(part))
