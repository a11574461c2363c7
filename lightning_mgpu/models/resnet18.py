"""The slightly modified ResNet-18 of d2l.ai, 'Concise Implementation for Multiple GPUs'."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mgpu.models.classifier import Classifier, init_weights


class ResNet18(Classifier):
    """The book's ResNet-18 for images (N, in_channels, H, W): 11,175,818 parameters, SGD at 0.1.

    Its stem is smaller than that of He et al. (2016): a 3x3 convolution, stride 1, no max-pooling.
    `init` takes weights from the book's N(0, 0.01), or those of He et al. (2015).
    """

    def __init__(
        self, in_channels: int = 1, init: Literal["book", "kaiming"] = "book", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.example_input_array = torch.zeros(1, in_channels, 28, 28)
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 64, kernel_size=3, padding=1),  # (N, 64, 28, 28)
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Sequential(Residual(64, 64), Residual(64, 64)),  # (N, 64, 28, 28)
            nn.Sequential(Residual(64, 128, stride=2), Residual(128, 128)),  # (N, 128, 14, 14)
            nn.Sequential(Residual(128, 256, stride=2), Residual(256, 256)),  # (N, 256, 7, 7)
            nn.Sequential(Residual(256, 512, stride=2), Residual(512, 512)),  # (N, 512, 4, 4)
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (N, 512)
            nn.Linear(512, self.num_classes),
        )
        init_weights(self.net, init, zero_biases=False)  # torch's default biases, as in the book


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 one where the shape changes (d2l.ai, 'ResNet')."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv3 = None
        if stride != 1 or in_channels != out_channels:
            self.conv3 = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride)

    def forward(self, X: Tensor) -> Tensor:
        Y = F.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        return F.relu(Y + (X if self.conv3 is None else self.conv3(X)))
