"""Weights to start from, other than the book's."""

from torch import nn


def kaiming(module: nn.Module) -> None:
    """He et al. (2015): N(0, 2 / fan_in) for layers followed by ReLU, so that activations keep their size; no bias."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
