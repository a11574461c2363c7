"""What a replica that had no samples in a step goes on with: what the first one has made of them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow


@dataclass
class State:
    h: torch.Tensor


def batches_of(make_loader: Any, sizes: tuple[int, ...]) -> DataLoader:
    batches = [batch for size in sizes for batch in make_loader(batch_size=size, num_samples=size)]
    return DataLoader(batches, batch_size=None)


def test_an_object_changed_by_a_batch_without_samples_for_all(Regression, assert_parity, make_loader):
    """Made by the first step, written in every one."""

    class Module(Regression):
        state = None

        def training_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X)
            if self.state is None:
                self.state = State(torch.zeros(1, 3, dtype=torch.float64, device=X.device))
            h = self.state.h if len(self.state.h) in (1, len(X)) else self.state.h[:1] * 0
            self.state.h = Z.detach()
            return F.mse_loss(Z + h, y)

    assert_parity(Module, loader=make_loader(batch_size=12, num_samples=25), max_epochs=3)


@dataclass
class Head:
    net: nn.Module
    h: Any = None


def test_an_object_made_by_a_batch_without_samples_for_all(Regression, assert_parity, make_loader):
    """Every replica goes on with one of its own, and the layers in it are its own."""
    agree = []

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X, y = batch
            if batch_idx == 0 or len(X) == 1:
                self.head, self.steps = Head(self.net), np.zeros(1)
            self.steps += 1
            self.head.h = self.head.net(X)
            agree.append(self.head.net is self.net)
            return F.mse_loss(self.head.h * self.steps[0], y)

        def on_train_epoch_end(self):
            self.head.h = None

    assert_parity(Module, loader=batches_of(make_loader, (12, 1, 12, 12)))
    assert all(agree)


@pytest.mark.parametrize("sizes", [(12, 1), (12, 1, 12), (1, 12, 12), (12, 1, 1, 12)], ids=str)
def test_what_is_collected_around_a_batch_without_samples_for_all(Regression, trainer_on, make_loader, sizes):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.begun, self.names, self.counts = [], set(), Counter()
            if len(batch[0]) == 1:
                self.names.clear(), self.counts.clear()
            self.begun += batch[0][:, 0].tolist()
            self.names.add(batch_idx)
            self.counts[batch_idx] += len(batch[0])
            return self.loss(batch)

        def on_train_epoch_end(self):
            self.end = self.begun, self.names, dict(self.counts)

    ends = []
    for k in (1, 2, 3):
        module = Module()
        trainer_on(k, max_epochs=1, limit_val_batches=0).fit(module, batches_of(make_loader, sizes))
        ends.append(module.end)
    assert ends[1:] == ends[:1] * 2


def test_what_is_kept_for_a_replica_without_samples_does_not_pile_up(Regression, trainer_on, make_loader):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.seen = {}

        def predict_step(self, batch, batch_idx):
            self.seen["last"], self.seen["object"] = batch[0] + 1, State(batch[0] + 2)
            twins = self.trainer.strategy._replicas.attributes[0].twins
            held = twins._kept, twins._kept_before, twins._made, twins._made_before, twins._shared, twins._then
            kept.append(sum(map(len, held)))

    kept: list[int] = []
    trainer_on(2).predict(Module(), make_loader(batch_size=1))
    assert kept[5] == kept[-1]
