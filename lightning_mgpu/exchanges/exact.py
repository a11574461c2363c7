"""The exact sum: every replica sends its whole tensor."""

from collections.abc import Generator
from typing import Any

from torch import Tensor


def exact(X: Tensor, state: dict) -> Generator[Any, Any, Tensor]:
    """The book's allreduce, as one replica sees it."""
    return sum((yield X))
