"""A model that is not of images."""

from torch import nn

from lightning_mgpu.models import Classifier


class VectorNet(Classifier):
    """Of vectors (N, 4)."""

    def __init__(self) -> None:
        super().__init__(num_classes=3)
        self.net = nn.Linear(4, 3)
