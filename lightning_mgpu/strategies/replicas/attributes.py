"""A module's plain attributes: given to a replica before a step, and what it puts into lists and dicts taken from it.

Numbers, texts and flags are given as they are. Lists, dicts and sets are copied with all lists, dicts and sets in them,
and what a replica adds to its copies in the step is added to the original's afterwards: values of new keys, items of
lists, what a `collections.Counter` counts. So are those in the body of a user's class. What else there is of a
replica's own, and what hooks become, `twins.py` says. Other objects are the replica's own copies, or shared where a
hook has set them since the replica was made; arrays of numpy's are shared.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mgpu.strategies.batch.gather import bring_home
from lightning_mgpu.strategies.layers.own_forward import OwnForward
from lightning_mgpu.strategies.replicas.twins import Twins
from lightning_mgpu.strategies.replicas.values import CONTAINERS, PLAIN

BUILT_IN = frozenset((*vars(LightningModule()), "_compiled_call_impl"))  # what torch and Lightning keep there
NEVER_GIVEN = (Tensor, OwnForward)  # seen to elsewhere; every replica's own
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


class Attributes:
    """Attributes, forward and backward hooks of a module's and its replica's layers.

    Args:
        pairs: A layer, its copy, and whether its class is a user's.
        twins: The replica's own.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module, bool]], twins: Twins) -> None:
        self.pairs, self.twins = pairs, twins
        self._hooks: list[tuple[dict, dict, dict]] = []  # the original's, the replica's, the original's when given
        for original, replica, _ in pairs:
            for name in HOOKS:
                if name in vars(original):
                    vars(replica)[name] = type(vars(original)[name])()
                    self._hooks.append((vars(original)[name], vars(replica)[name], {}))
        self._of_classes = [(*pair[:2], *found) for pair in pairs if pair[2] for found in _in_classes(pair[0])]
        self.shares_iterators = False  # a generator, an iterator over batches
        self._begun: dict[int, tuple[list, list]] = {}  # lists that a step has put in the place of others, by id
        self._names = self._names_now()  # of the original's attributes when last seen, by the layer's id
        visited: dict[int, bool] = {}
        for replica, name, value in self._users():
            copied = vars(replica).get(name)
            twins.find(value, copied, visited)
            twins.add_objects(value, copied, set())

    def give(self) -> None:
        """Give the replica what the original has."""
        self.twins.refresh()
        self.shares_iterators = False
        for original, replica, is_users in self.pairs:
            if is_users and (known := self._names[id(original)]) != vars(original).keys():
                for name in known - vars(original).keys():  # a hook has deleted it
                    vars(replica).pop(name, None)
            elif "forward" in vars(replica) and "forward" not in vars(original):
                del vars(replica)["forward"]
            if replica.training != original.training:
                replica.training = original.training  # a scripted one's is no attribute
            for name, value in vars(original).items():
                if isinstance(value, PLAIN):
                    vars(replica)[name] = value
                elif name not in BUILT_IN and (is_users or name == "forward") and not isinstance(value, NEVER_GIVEN):
                    own = vars(replica)[name] = self.twins.own(value)
                    self.shares_iterators |= own is value and isinstance(value, Iterator)
        for original, replica, owner, name in self._of_classes:
            if name not in vars(original):
                vars(replica)[name] = self.twins.own(vars(owner)[name])
        for hooks, own, given in self._hooks:
            is_same = hooks == given and hooks.keys() == own.keys()  # then compiled code need not look at them again
            if not is_same or any(isinstance(hook, partial) for hook in hooks.values()):
                own.clear()
                own.update({key: self.twins.own(hook) for key, hook in hooks.items()})
                given.clear()
                given.update(hooks)

    def share_layers(self) -> bool:
        """Whether an object that the replica shares, as it has none of its own, leads to the original's layers."""
        return any(self.twins.shares_layers(value, set()) for _, _, value in self._users())

    def collect(self, device: torch.device, inserted: dict[int, int], is_active: bool) -> None:
        """Add to the original's lists and dicts what the replica added to its copies, in order.

        Args:
            device: The original's.
            inserted: How many items replicas before this one have put into a list ahead of this step's, by its id.
            is_active: Whether the replica had samples; else it goes on with what the original has made of its.
        """
        bring = partial(bring_home, home=device, away=self.twins.device)
        given = self.twins.copied.values()
        begun: dict[int, tuple[list, list]] = {}
        if is_active:
            self.twins.keep((value, vars(replica).get(name)) for replica, name, value in self._users())
            copies = {id(copied) for _, copied, _ in given}
            begun = dict(self._find_begun(copies))
        for original, copied, then in given:
            if not is_active:
                if id(original) in self._begun and len(original) > then:
                    self._add_begun(original, then, inserted, bring)
                continue
            if isinstance(original, Counter):
                original.update({key: bring(count) - then.get(key, 0) for key, count in copied.items()})
            elif id(original) not in begun and self._has_more(original, copied, then):
                if id(original) in self._begun:  # so it collects: what it began with, too
                    self._add_begun(original, then, inserted, bring)
                _add(original, copied, then, copies, bring)
        if (elsewhere := self.twins.elsewhere).is_there:
            elsewhere.grown = {
                id(original): original
                for original, _, then in given
                if id(original) in elsewhere.grown or len(original) > (then if isinstance(then, int) else len(then))
            }
        if is_active:
            self._names = self._names_now()
        else:
            self.twins.catch_up(value for _, _, value in self._users())
        here = {id(value) for _, _, value in self._users()}
        self._begun = {key: value for key, value in (self._begun | begun).items() if key in here}
        self.twins.copied, self.twins.ends = {}, {}

    def _add_begun(self, original: list, then: int, inserted: dict[int, int], bring: Callable[[Any], Any]) -> None:
        """Add what the replica began a list with, behind the `then` items that were there, and those of others."""
        items = bring(self._begun.pop(id(original))[1])
        at = then + inserted.get(id(original), 0)
        original[at:at] = items
        inserted[id(original)] = at - then + len(items)

    def _find_begun(self, copies: set[int]) -> Iterator[tuple[int, tuple[list, list]]]:
        """Lists this step has begun, `if batch_idx == 0: self.outputs = []` say, and the items of the replica's.

        They are remembered until a later step appends to them. Where none does, they are a state the replicas have.
        """
        for replica, name, value in self._users():
            own = vars(replica).get(name)
            if type(value) is type(own) is list and own is not value:
                if id(value) not in self.twins.copied:
                    is_begun = id(own) not in copies
                else:  # cleared: the last item is gone
                    is_begun = id(value) in self.twins.ends and len(own) > 0
                    is_begun = is_begun and all(item is not self.twins.ends[id(value)][1] for item in own)
                if is_begun:
                    yield id(value), (value, list(own))

    def _has_more(self, original: Any, copied: Any, then: Any) -> bool:
        """Whether something was added to a copy; not to the left of what a list held, whose order nobody knows."""
        if not isinstance(original, (list, deque)):
            return True
        first, last = self.twins.ends.get(id(original), (None, None))
        return len(copied) > then and (then == 0 or copied[0] is first or copied[then - 1] is last)

    def _names_now(self) -> dict[int, set[str]]:
        return {id(original): set(vars(original)) for original, _, is_users in self.pairs if is_users}

    def _users(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """A replica's layer of the user's own, and name and value of an attribute that is more than a number."""
        for original, replica, is_users in self.pairs:
            if is_users:
                for name, value in vars(original).items():
                    if name not in BUILT_IN and not isinstance(value, (*NEVER_GIVEN, *PLAIN)):
                        yield replica, name, value


def _in_classes(module: nn.Module) -> Iterator[tuple[type, str]]:
    """Lists, dicts and sets in the body of a user's class, `outputs = []` say, which all its objects share."""
    for owner in type(module).__mro__:
        if not owner.__module__.startswith(("torch.", "lightning.", "builtins")):
            for name, value in vars(owner).items():
                if isinstance(value, CONTAINERS) and not name.startswith("__"):
                    yield owner, name


def _add(original: Any, copied: Any, then: Any, copies: set[int], bring: Callable[[Any], Any]) -> None:
    """Add what is in a copy of a container and was not then: beyond its first `then` items, or not among its keys."""
    if isinstance(original, set):
        original |= {bring(item) for item in copied if item not in original}
    elif isinstance(original, dict):
        if then and copied.keys() == then.keys():  # far faster than the loop where a dict is long
            return
        for key, value in copied.items():
            if then and key in then:
                continue
            if key not in original:
                original[key] = bring(value)
            elif type(value) is type(original[key]) and isinstance(value, CONTAINERS) and id(value) not in copies:
                _add(original[key], value, 0, copies, bring)
    elif len(copied) > then:
        original.extend(bring(list(islice(copied, then, None))))
