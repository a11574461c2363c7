"""The test to copy first: a model, a loader, and two processes that train as one device does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.strategies.conftest import Net, assert_close, fit, samples


class Deep(Net):
    """`Net` is a LightningModule with a loss and SGD; only what is special stands here."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train() -> Any:
    """The trained weights and what was logged, in as many processes as call this."""
    return fit(Deep, DataLoader(samples(), batch_size=10, shuffle=True))


def test_two_processes_train_as_one_device(in_two_processes: Callable) -> None:
    for trained in in_two_processes(train):
        assert_close(trained, train())
