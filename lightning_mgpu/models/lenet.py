"""LeNet as in d2l.ai, 'Training on Multiple GPUs': ReLU, average pooling, weights from N(0, 0.01).

python -m lightning_mgpu fit --model=LeNet
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD

from lightning_mgpu.models.classifier import Classifier, OptimizerCallable, kaiming


class LeNet(Classifier):
    """The book's LeNet on images (N, 1, 28, 28): 129,068 parameters, SGD at 0.2 for batches of 256.

    Beside `Classifier`'s arguments it takes `init`: weights from the book's N(0, 0.01), or those of
    He et al. (2015).
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.2),
        num_classes: int = 10,
        init: Literal["book", "kaiming"] = "book",
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, num_classes=num_classes, **kwargs)
        self.example_input_array = torch.zeros(1, 1, 28, 28)
        self.net = nn.Sequential(
            nn.Conv2d(1, 20, kernel_size=3),  # (N, 20, 26, 26)
            nn.ReLU(),
            nn.AvgPool2d(2),  # (N, 20, 13, 13)
            nn.Conv2d(20, 50, kernel_size=5),  # (N, 50, 9, 9)
            nn.ReLU(),
            nn.AvgPool2d(2),  # (N, 50, 4, 4)
            nn.Flatten(),  # (N, 800)
            nn.Linear(800, 128),
            nn.ReLU(),
            nn.Linear(128, num_classes),  # (N, num_classes)
        )
        self.net.apply(_init_weights if init == "book" else kaiming)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.normal_(module.weight, std=0.01)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
