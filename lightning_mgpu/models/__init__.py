"""LightningModules: shared steps in `classifier.py`, one network per file."""

from lightning_mgpu.models.classifier import Classifier, OneCycle
from lightning_mgpu.models.lenet import LeNet
from lightning_mgpu.models.resnet18 import ResNet18

__all__ = ["Classifier", "LeNet", "OneCycle", "ResNet18"]
