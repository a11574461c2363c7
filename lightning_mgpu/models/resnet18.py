"""The slightly modified ResNet-18 of d2l.ai, 'Concise Implementation for Multiple GPUs'."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mgpu.models.classifier import Classifier, Init, init_weights


class ResNet18(Classifier):
    """The book's ResNet-18 for images (N, in_channels, H, W): 11,175,818 parameters, SGD at 0.1.

    Its stem is smaller than in He et al. (2016): a 3x3 convolution, stride 1, no max-pooling.
    A `width` of 16 gives a sixteenth of the parameters.
    """

    def __init__(
        self, in_channels: int = 1, init: Init = "book", width: int = 64, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        w = width
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, w, kernel_size=3, padding=1),  # (N, w, 28, 28)
            nn.BatchNorm2d(w),
            nn.ReLU(),
            # (N, w, 28, 28), (N, 2w, 14, 14), (N, 4w, 7, 7), (N, 8w, 4, 4)
            nn.Sequential(Residual(w, w), Residual(w, w)),
            nn.Sequential(Residual(w, 2 * w, stride=2), Residual(2 * w, 2 * w)),
            nn.Sequential(Residual(2 * w, 4 * w, stride=2), Residual(4 * w, 4 * w)),
            nn.Sequential(Residual(4 * w, 8 * w, stride=2), Residual(8 * w, 8 * w)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (N, 8w)
            nn.Linear(8 * w, self.num_classes),
        )
        init_weights(self.net, init, zero_biases=False)  # torch's default biases, as in the book


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 one if the shape changes (d2l.ai, 'ResNet')."""

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
