"""Layers and parameters against the book's numbers; first weights."""

import pytest
import torch
from torch import nn

from lightning_mgpu.models import LeNet, ResNet18


def test_resnet18_is_the_books() -> None:
    """That LeNet is, test_book.py shows: it trains as the chapter's functions do."""
    model, X, shapes = ResNet18(), torch.zeros(2, 1, 28, 28), []
    assert sum(p.numel() for p in model.parameters()) == 11_175_818
    for layer in model.net:
        X = layer(X)
        shapes.append(tuple(X.shape[1:]))
    stem, stages = (64, 28, 28), [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    assert shapes == [stem, stem, stem, *stages, (512, 1, 1), (512,), (10,)]
    shortcuts = [block.conv3 is not None for stage in model.net[3:7] for block in stage]
    assert shortcuts == [False, False, True, False, True, False, True, False]
    assert ResNet18(width=16).net[6][1].conv2.weight.shape == (128, 128, 3, 3)
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
