"""What callbacks leave in a directory, and a model that is not of images."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from lightning_mgpu.models import Classifier


class _VectorNet(Classifier):
    """Of vectors (N, 4), which are no images."""

    def __init__(self) -> None:
        super().__init__(num_classes=3)
        self.net = nn.Linear(4, 3)


@pytest.fixture
def VectorNet() -> type[Classifier]:
    return _VectorNet


@pytest.fixture
def files() -> Callable[[Path], set[str]]:
    """The names of what is in a directory."""
    return lambda directory: {path.name for path in directory.iterdir()}
