"""Layers and parameters against the book's numbers."""

import pytest
import torch
from torch import nn

from lightning_mgpu.models import LeNet, ResNet18


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """The output shape of every layer of `net`, without the batch's dimension."""
    found, X = [], torch.zeros(2, 1, 28, 28)
    for layer in model.net:
        X = layer(X)
        found.append(tuple(X.shape[1:]))
    return found


def test_lenet_is_the_books() -> None:
    model = LeNet()
    assert sum(p.numel() for p in model.parameters()) == 129_068
    conv1, pool1, conv2, pool2 = (20, 26, 26), (20, 13, 13), (50, 9, 9), (50, 4, 4)
    flat = [(800,), (128,), (128,), (10,)]
    assert shapes(model) == [conv1, conv1, pool1, conv2, conv2, pool2, *flat]
    names = ["Conv2d", "ReLU", "AvgPool2d"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]
    assert [type(layer).__name__ for layer in model.net] == names


def test_resnet18_is_the_books() -> None:
    model = ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_175_818
    stem, stages = (64, 28, 28), [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    assert shapes(model) == [stem, stem, stem, *stages, (512, 1, 1), (512,), (10,)]
    shortcuts = [block.conv3 is not None for stage in model.net[3:7] for block in stage]
    assert shortcuts == [False, False, True, False, True, False, True, False]
    assert ResNet18(in_channels=3, num_classes=7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("model_class", [LeNet, ResNet18])
def test_initial_weights(model_class: type) -> None:
    """N(0, 0.01) as in the book, or of a size that keeps that of the activations."""
    torch.manual_seed(0)
    for layer in model_class().modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            n = layer.weight.numel()
            # four standard errors
            assert layer.weight.std().item() == pytest.approx(0.01, rel=4 / (2 * n) ** 0.5)
            assert abs(layer.weight.mean().item()) < 4 * 0.01 / n**0.5
            assert layer.bias.any() == (model_class is ResNet18)
    assert 0.1 < model_class(init="kaiming")(torch.randn(64, 1, 28, 28)).std().item() < 10
