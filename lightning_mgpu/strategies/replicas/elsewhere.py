"""What lies on another device than the replica's, as does what hooks set on GPU 0 while the replica is on GPU 1.

Replicas on the original's device share it. Others have copies, which are given what the original has before every step.
What the user keeps on the CPU beside GPUs stays there.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn

from lightning_mgpu.strategies.replicas.get_params import SHARED
from lightning_mgpu.strategies.replicas.values import (
    CONTAINERS,
    FOLLOWED,
    PLAIN,
    contents_of,
    copy_to,
    is_looked_into,
    is_object,
    parts_of,
    set_attribute,
    version_of,
)

NEVER_COPIED = (*FOLLOWED, *SHARED, Profiler, ModuleType, type, *weakref.ProxyTypes)


class Elsewhere:
    """Copies on a replica's device of what is on the original's.

    Args:
        known: What the replica has its own of, by the `id` of what it is in the place of.
        home, device: The original's device, and the replica's.
        own: Gives the replica's own of anything.
    """

    def __init__(
        self, known: dict[int, Any], home: torch.device, device: torch.device, own: Callable[[Any], Any]
    ) -> None:
        self.known, self.home, self.device, self.own = known, home, device, own
        self.late: dict[int, tuple[Any, Any]] = {}  # objects set since the replica was made, and their copies
        self._given: set[int] = set()  # those of them that were given in this step
        # Tensors, their versions and copies, in this step and in the one before
        self._moved: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._moved_before: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.grown: dict[int, Any] = {}  # long lists and dicts that steps add to

    @property
    def is_there(self) -> bool:
        """Whether the replica has another device than the original."""
        return self.home != self.device

    def begin_step(self) -> None:
        """Forget what nobody has asked for in the last step."""
        self.late = {key: pair for key, pair in self.late.items() if key in self._given}
        self._given = set()
        self._moved, self._moved_before = {}, self._moved

    def place(self, tensor: Tensor) -> torch.device:
        """Where the replica's own of a tensor is."""
        return tensor.device if tensor.is_cpu and self.home.type != "cpu" else self.device

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor itself, where the replica can use it; else a copy on its device."""
        if self.place(tensor) == tensor.device:
            return tensor
        nothing: Any = (None, 0, tensor)
        original, version, own = self._moved.get(id(tensor)) or self._moved_before.get(id(tensor), nothing)
        if original is not tensor or version != version_of(tensor):
            own = copy_to(tensor, self.device)
        self._moved[id(tensor)] = tensor, version_of(tensor), own
        return own

    @torch.no_grad()
    def brought(self, value: Any) -> Any:
        """An object, or layers, set since the replica was made: itself, or a copy if tensors in it are elsewhere.

        What cannot be copied is shared, as when replicas are made.
        """
        if not self.is_there or not is_object(value) or isinstance(value, NEVER_COPIED):
            return value
        original, own = self.late.get(id(value), (None, None))
        if original is value and id(value) in self._given:
            return own
        if original is not value:
            if not self.has_tensors_of(value):
                return value
            try:
                own = copy.deepcopy(value).to(self.device) if isinstance(value, nn.Module) else copy.copy(value)
            except Exception:
                return value
            self.late[id(value)] = value, own
        self._given.add(id(value))
        if isinstance(value, nn.Module):
            self._follow(own, value)
        else:
            for name, part in contents_of(value):
                set_attribute(own, name, self.own(part))
        return own

    def has_tensors_of(self, value: Any) -> bool:
        """Whether there is a tensor in a value which the replica cannot use as it is."""
        todo, visited = [value], set()
        while todo:
            part = todo.pop()
            if id(part) in visited or isinstance(part, (*PLAIN, *NEVER_COPIED)):
                continue
            visited.add(id(part))
            if isinstance(part, (nn.Module, Tensor)):
                tensors = [part] if isinstance(part, Tensor) else [*part.parameters(), *part.buffers()]
                if id(part) not in self.known and any(self.place(tensor) != tensor.device for tensor in tensors):
                    return True
            elif not isinstance(part, (*CONTAINERS, tuple)) or is_looked_into(part):
                todo += [inner for inner, _ in parts_of(part, part)]
        return False

    def items_in(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """Of a long list or dict: what may be elsewhere, unless steps add to it, which then read it rarely."""
        is_buffer = getattr(value, "maxlen", None) is not None
        if self.is_there and not isinstance(value, set) and (is_buffer or id(value) not in self.grown):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(item, (*CONTAINERS, tuple, Tensor)):
                    yield key, item

    def _follow(self, own: nn.Module, value: nn.Module) -> None:
        for layer, its_copy in zip(value.modules(), own.modules()):
            vars(its_copy).update({name: item for name, item in vars(layer).items() if isinstance(item, PLAIN)})
        tensors, copies = ([*layer.parameters(), *layer.buffers()] for layer in (value, own))
        for tensor, copied in zip(tensors, copies):
            follow_tensor(copied, tensor, self.place(tensor))


def follow_tensor(copied: Tensor, value: Tensor, device: torch.device) -> None:
    """Give a copy what the original has, on a device."""
    if copied.device == device:
        copied.data.copy_(value)
    else:
        copied.data = value.detach().to(device, copy=True)
