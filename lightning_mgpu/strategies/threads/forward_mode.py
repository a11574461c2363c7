"""Forward-mode AD (`torch.func.jvp`, `jacfwd`, `hessian`, `dual_level`) has one level for the whole process.

Replicas that are inside of it at the same time would take each other's derivatives: one at a time may be.
"""

import contextlib
import threading
from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from lightning_mgpu.strategies.threads.patches import Patch

_TURN = threading.RLock()
_INSIDE = threading.local()  # `depth`: how often the thread has entered


def is_inside() -> bool:
    """Whether this thread is inside forward-mode AD, where it must not wait for other replicas."""
    return getattr(_INSIDE, "depth", 0) > 0


def _patch(undo: contextlib.ExitStack) -> None:
    nesting, level = eager_transforms.jvp_increment_nesting, forward_ad.dual_level
    enter, leave = level.__enter__, level.__exit__

    @contextlib.contextmanager
    def in_turn() -> Iterator[Any]:
        with _turn(), nesting() as number:
            yield number

    @wraps(enter)
    def enter_in_turn(self: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_turn())
            level = enter(self)  # may raise: they cannot be nested
            self.turn = stack.pop_all()
        return level

    @wraps(leave)
    def leave_in_turn(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            self.turn.close()

    for owner, name, new in (
        (eager_transforms, "jvp_increment_nesting", in_turn),
        (level, "__enter__", enter_in_turn),
        (level, "__exit__", leave_in_turn),
    ):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    with _TURN:
        _INSIDE.depth = getattr(_INSIDE, "depth", 0) + 1
        try:
            yield
        finally:
            _INSIDE.depth -= 1


one_at_a_time = Patch(_patch)
"""Lets threads enter forward-mode AD one after another."""
