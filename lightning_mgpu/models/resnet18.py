"""The slightly modified ResNet-18 of d2l.ai, 'Concise Implementation for Multiple GPUs'.

A smaller stem than He et al. (2016): a 3x3 convolution, stride 1, no max-pooling, for 28x28 images.

    python -m lightning_mgpu fit --model=ResNet18
    python -m lightning_mgpu fit --config experiment/resnet18_book_2dev.yaml
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mgpu.models.classifier import Classifier, OptimizerCallable, kaiming


class ResNet18(Classifier):
    """The book's ResNet-18 for images (N, in_channels, H, W).

    11,175,818 parameters for one channel and ten classes. SGD at 0.1 for a global batch of 256; the
    book takes 0.2 and 512 on two devices. Beside `Classifier`'s arguments it takes `in_channels` (1
    for grey images) and `init` (`book`: N(0, 0.01); `kaiming`: He et al., 2015).
    """

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.1),
        num_classes: int = 10,
        in_channels: int = 1,
        init: Literal["book", "kaiming"] = "book",
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, num_classes=num_classes, **kwargs)
        self.example_input_array = torch.zeros(1, in_channels, 28, 28)
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 64, kernel_size=3, padding=1),  # (N, 64, 28, 28)
            nn.BatchNorm2d(64),
            nn.ReLU(),
            _stage(64, 64, stride=1),  # (N, 64, 28, 28)
            _stage(64, 128, stride=2),  # (N, 128, 14, 14)
            _stage(128, 256, stride=2),  # (N, 256, 7, 7)
            _stage(256, 512, stride=2),  # (N, 512, 4, 4)
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (N, 512)
            nn.Linear(512, num_classes),
        )
        self.net.apply(_init_weights if init == "book" else kaiming)


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 one where the shape changes (d2l.ai, 'ResNet')."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        changes_shape = stride != 1 or in_channels != out_channels
        self.conv3 = (
            nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride)
            if changes_shape
            else None
        )

    def forward(self, X: Tensor) -> Tensor:
        Y = F.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        return F.relu(Y + (X if self.conv3 is None else self.conv3(X)))


def _stage(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        Residual(in_channels, out_channels, stride), Residual(out_channels, out_channels)
    )


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.normal_(module.weight, std=0.01)  # biases keep torch's default, as in the book
