"""A module's plain attributes: given to a replica before a step, and what it puts into lists and dicts taken from it.

Numbers, texts and flags are given as they are. Lists, dicts and sets are copied with all lists, dicts and sets in them,
and what a replica adds to its copies in the step is added to the original's afterwards: values of new keys, items of
lists. Other objects are the replica's own copies, or shared where a hook has set them since the replica was made.
"""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
CONTAINERS = (list, dict, set, deque)
OWN = frozenset(vars(LightningModule()))  # what torch and Lightning keep there
FEW = 100  # longer lists are collected outputs: what is in those stays as it is


class Attributes:
    """Attributes of a module's and its replica's layers.

    Args:
        pairs: A layer, its copy, and whether its class is a user's.
        twins: The replica's own, by the `id` of what it is a copy of: parameters and layers.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module, bool]], twins: dict[int, Any]) -> None:
        self.pairs, self.twins = pairs, twins
        self._seen = {(id(original), name): v for original, _, _ in pairs for name, v in vars(original).items()}
        self._copied: dict[int, tuple[Any, Any, int]] = {}  # by id: an original, its copy, its length when copied

    def give(self) -> None:
        """Give the replica what the original has."""
        self._copied = {}
        for original, replica, is_users in self.pairs:
            for name, value in vars(original).items():
                if isinstance(value, PLAIN):
                    vars(replica)[name] = value
                elif is_users and name not in OWN and not isinstance(value, Tensor):
                    self._give(original, replica, name, value)

    def collect(self, device: torch.device) -> None:
        """Add to the original's lists and dicts what the replica added to its copies, in order."""
        copies = {id(copied) for _, copied, _ in self._copied.values()}
        for original, copied, length in self._copied.values():
            _add(original, copied, length, copies, device)
        self._copied = {}

    def _give(self, original: nn.Module, replica: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, CONTAINERS):
            if not _holds(value, self.twins):
                vars(replica)[name] = self._copy(value)
        elif id(value) in self.twins:
            vars(replica)[name] = self.twins[id(value)]
        elif self._seen.get((id(original), name)) is not value:
            vars(replica)[name] = self._seen[id(original), name] = value

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copied:  # under two names
            return self._copied[id(value)][1]
        copied = copy.copy(value)
        self._copied[id(value)] = value, copied, len(value)
        for key, item in _items(value):
            if isinstance(item, CONTAINERS):
                copied[key] = self._copy(item)
            elif id(item) in self.twins:
                copied[key] = self.twins[id(item)]
        return copied


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a container, as far as there may be containers among them."""
    if isinstance(value, dict):
        yield from value.items()
    elif not isinstance(value, set) and len(value) <= FEW:
        yield from enumerate(value)


def _holds(value: Any, twins: dict[int, Any]) -> bool:
    """Whether there are modules in a container that the replica has its own copies of, unknown here."""
    for _, item in _items(value):
        if isinstance(item, (nn.Module, nn.Parameter)) and id(item) not in twins:
            return True
        if isinstance(item, (*CONTAINERS, tuple)) and item is not value and _holds(item, twins):
            return True
    return False


def _add(original: Any, copied: Any, length: int, copies: set[int], device: torch.device) -> None:
    """Add what is in a copy of a container beyond its first `length` items."""
    if isinstance(original, set):
        original |= copied
    elif isinstance(original, dict):
        for key, value in islice(copied.items(), length, None):
            if key not in original:
                original[key] = move_data_to_device(value, device)
            elif type(value) is type(original[key]) and isinstance(value, CONTAINERS) and id(value) not in copies:
                _add(original[key], value, 0, copies, device)
    elif len(copied) > length:
        original.extend(move_data_to_device(list(islice(copied, length, None)), device))
