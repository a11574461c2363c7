"""Calls of `LightningModule.log` while replicas run, from wherever they come.

Users call `self.log` and `super().log`, and keep `self.log` in partials, lists and layers, which hold the function
itself. So it stays, and has other code for as long as a step takes, which does what the replica of the thread says.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule

from lightning_mgpu.strategies.threads.patches import Patch

_HERE = threading.local()  # `log`: what the replica this thread runs does instead
_MARK = "_lightning_mgpu_replica"  # an attribute of the original and its replicas while they run

_FUNCTION: Any = inspect.unwrap(LightningModule.log)  # somebody may have decorated it

LOG = FunctionType(
    _FUNCTION.__code__, _FUNCTION.__globals__, _FUNCTION.__name__, _FUNCTION.__defaults__, _FUNCTION.__closure__
)
"""Lightning's own, also while replicas run."""
LOG.__kwdefaults__ = _FUNCTION.__kwdefaults__


@contextlib.contextmanager
def instead_of_log(function: Callable[..., None], module: LightningModule) -> Iterator[None]:
    """Let calls by this thread, of whichever replica's `log`, call the function: a shared object has the original's.

    So do calls of `module.log` by threads of autograd's, where a hook on a tensor of a GPU runs.
    """
    _HERE.log = vars(module)[_MARK] = function
    try:
        yield
    finally:
        del _HERE.log
        vars(module)[_MARK] = None


@contextlib.contextmanager
def intercepted(replicas: Sequence[LightningModule]) -> Iterator[None]:
    """Make `instead_of_log` work for calls of these modules' `log`."""
    for module in replicas:
        vars(module)[_MARK] = None
    try:
        with _other_code():
            yield
    finally:
        for module in replicas:
            del vars(module)[_MARK]


def called(module: LightningModule, *args: Any, **kwargs: Any) -> None:
    """A call of `LightningModule.log`."""
    log = getattr(_HERE, "log", vars(module)[_MARK]) if _MARK in vars(module) else None
    (log or partial(LOG, module))(*args, **kwargs)


def _calls_ours(self, *args, **kwargs):  # type: ignore[no-untyped-def]
    from lightning_mgpu.strategies.recording.log_calls import called  # it runs among Lightning's globals

    called(self, *args, **kwargs)


def _patch(undo: contextlib.ExitStack) -> None:
    for name, new in (("__code__", _calls_ours.__code__), ("__defaults__", None), ("__kwdefaults__", None)):
        undo.callback(setattr, _FUNCTION, name, getattr(_FUNCTION, name))
        setattr(_FUNCTION, name, new)


_other_code = Patch(_patch)
