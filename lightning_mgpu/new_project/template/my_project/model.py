"""The model. Every argument of `MyModel` is an option: `--model.width=64`."""

from typing import Any

from lightning_mgpu.models import Classifier
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score


class MyModel(Classifier):
    """A small convolutional network on images (N, 1, 28, 28).

    `Classifier` provides the steps, the metrics, `--model.lr`, `--model.optimizer` and
    `--model.lr_scheduler`. Any other LightningModule also works.

    Args:
        width: Channels of the first layer; the second one has twice as many.
        num_classes: Number of classes.
    """

    def __init__(self, width: int = 16, num_classes: int = 10, **kwargs: Any) -> None:
        super().__init__(num_classes=num_classes, **kwargs)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=5, stride=2),  # (N, width, 12, 12)
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2),  # (N, 2 width, 5, 5)
            nn.ReLU(),
            nn.Flatten(),  # (N, 50 width)
            nn.Linear(50 * width, num_classes),  # (N, num_classes)
        )

    def make_metrics(self) -> MetricCollection:
        """Additional metrics. To monitor F1: `--checkpoint.monitor=val_f1 --checkpoint.mode=max`."""
        return MetricCollection({"f1": MulticlassF1Score(self.num_classes)})
