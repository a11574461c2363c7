"""LeNet as in d2l.ai, 'Training on Multiple GPUs': with ReLU and average pooling."""

from typing import Any

from torch import nn

from lightning_mgpu.models.classifier import Classifier, Init, init_weights


class LeNet(Classifier):
    """The book's LeNet on images (N, 1, 28, 28): 129,068 parameters, SGD at 0.2."""

    default_lr = 0.2

    def __init__(self, init: Init = "book", **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
            nn.Linear(128, self.num_classes),  # (N, num_classes)
        )
        init_weights(self.net, init, zero_biases=True)
