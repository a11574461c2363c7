"""Batches that layers have computed in `on_after_batch_transfer`: one graph reaches all shards."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow


@pytest.fixture
def Stem(Regression):
    """A first layer that looks at the whole batch."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, 6, dtype=torch.float64)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            X, y = batch
            Z = self.stem(X).tanh()
            return (Z - Z.mean(0), y) if self.trainer.training else (Z, y)

    return Module


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1, "val": True}])
def test_a_learned_transform(Stem, assert_parity, settings):
    assert_parity(Stem, **settings)


def test_in_manual_optimization(Stem, assert_parity):
    class Module(Stem):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_parity(Module)
