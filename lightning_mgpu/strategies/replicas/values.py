"""Looking into values: what is in lists, dicts, tuples and objects, as far as a replica may need its own of it."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_mgpu.strategies.batch.nesting import is_dataclass_instance

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
CONTAINERS = (list, dict, set, deque)
REBUILT = (MethodType, FunctionType, partial, weakref.ref, np.generic)  # of what is in them; or as plain as numbers
NO_OBJECTS = (nn.Module, Tensor, torch.Generator, np.ndarray)  # things of their own kind
FOLLOWED = (Optimizer, LightningOptimizer, LRScheduler, Trainer)  # they lead to layers, and are seen to elsewhere
REFERENCES = (nn.Module, nn.Parameter, weakref.ref)  # to what replicas have their own of
MAX_ITEMS = 100  # longer lists and dicts are collected outputs: what is in them stays, unless it is a reference


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in containers and objects, however long or deep, but not those of layers."""
    todo, visited = [value], set()
    while todo:
        part = todo.pop()
        if isinstance(part, Tensor):
            yield part
        elif id(part) not in visited and not isinstance(part, (*PLAIN, *FOLLOWED, nn.Module, ModuleType, type)):
            visited.add(id(part))
            todo += [inner for inner, _ in parts_of(part, part)]


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the replica's own; one with a graph is the thing itself, where it may be."""
    if not tensor.is_leaf:
        return tensor.to(device)
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def version_of(value: Any) -> int:
    """How often a tensor was changed in place; -1 where that is not counted."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def num_items(value: Any) -> int:
    """Of a container; a tuple of somebody's own may count something else, or refuse to (e3nn's irreps)."""
    return tuple.__len__(value) if isinstance(value, tuple) else len(value)


def items_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a container, as far as there may be something of the replica's among them."""
    if not isinstance(value, set) and is_looked_into(value):
        yield from value.items() if isinstance(value, dict) else enumerate(value)


def is_looked_into(items: Any) -> bool:
    """Whether a container is short, or one of layers, so that replicas have their own of what is in it."""
    if num_items(items) <= MAX_ITEMS:
        return True
    return isinstance(next(iter(items.values() if isinstance(items, dict) else items)), REFERENCES)


def is_object(value: Any) -> bool:
    """Whether it has attributes; a dataclass with slots has, too."""
    return hasattr(value, "__dict__") or is_dataclass_instance(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's attributes; there are none of what is no object."""
    if hasattr(value, "__dict__") or not is_dataclass_instance(value):
        return getattr(value, "__dict__", {})
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}


def set_attribute(value: Any, name: str, part: Any) -> None:
    """Set one without asking its class, which may be frozen or do more."""
    if hasattr(value, "__dict__"):
        vars(value)[name] = part
    else:
        object.__setattr__(value, name, part)


def contents_of(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, but not those of a layer."""
    if not isinstance(value, (nn.Module, nn.Parameter)):
        yield from attributes_of(value).items()


def parts_of(value: Any, copied: Any) -> Iterable[tuple[Any, Any]]:
    """What is in a value, and the same in its copy."""
    if isinstance(value, dict):
        return zip(value.values(), copied.values())
    if isinstance(value, (list, tuple, deque)):
        return zip(value, copied)
    if isinstance(value, MethodType):
        return [(value.__self__, copied.__self__)]
    return [(part, attributes_of(copied).get(name)) for name, part in attributes_of(value).items()]
