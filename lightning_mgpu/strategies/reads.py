"""What a step reads of a tensor, seen by whoever must prepare for it, or note it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def on_read(attribute: str, look: Callable[[Tensor], None], once: bool = False) -> Iterator[None]:
    """Inside the block `look(tensor)` is called before `tensor.<attribute>` is read."""
    itself: Any = getattr(torch._C.TensorBase, attribute)  # private: what `Tensor.grad` is

    def read(tensor: Tensor) -> Any:
        if once:
            restore()
        look(tensor)
        return itself.__get__(tensor)

    def restore() -> None:
        if attribute in vars(Tensor):
            delattr(Tensor, attribute)

    setattr(Tensor, attribute, property(read, itself.__set__, itself.__delete__))
    try:
        yield
    finally:
        restore()


def data_of(tensor: Tensor) -> Tensor:
    """`tensor.data`, which `on_read` does not see."""
    return torch._C.TensorBase.data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]
