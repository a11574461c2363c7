"""Functions of torch and Lightning that are others while a step runs, and their own again when it is over."""

import contextlib
import threading
from collections.abc import Callable, Iterator


class Patch:
    """A context several threads may be in; the first puts the patch in place, the last takes it back.

    Args:
        apply: Replaces functions, and tells the stack it gets how to undo that.
    """

    def __init__(self, apply: Callable[[contextlib.ExitStack], None]) -> None:
        self._apply = apply
        self._undo = contextlib.ExitStack()
        self._num_users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._num_users == 0:
                self._apply(self._undo)
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._undo.close()
