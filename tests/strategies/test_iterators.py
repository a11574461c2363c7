"""Generators and iterators on the module, which replicas share: each takes its own item, one at a time."""

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow


class Numbers:
    """0, 1, 2, ... of an iterator that cannot be copied, nor asked by two at a time."""

    def __init__(self):
        self.lock, self.number = threading.Lock(), -1

    def __iter__(self):
        return self

    def __next__(self):
        assert self.lock.acquire(blocking=False), "two at a time"
        self.number += 1
        time.sleep(0.002)
        self.lock.release()
        return self.number


def numbers():
    for number in range(10**6):
        time.sleep(0.002)  # the other replicas come, too
        yield number


def batches():
    while True:
        yield from (int(batch) for batch in DataLoader(torch.arange(5)))


@pytest.mark.parametrize("make", [numbers, Numbers, batches])
@pytest.mark.parametrize("hook", ["__init__", "on_train_start"])
def test_each_replica_takes_its_own(Regression, train, make, hook):
    taken = []

    class Module(Regression):
        def __init__(self):
            super().__init__()
            if hook == "__init__":
                self.extra = make()

        def on_train_start(self):
            if hook == "on_train_start":
                self.extra = make()

        def training_step(self, batch, batch_idx):
            taken.append(next(self.extra))
            return self.loss(batch)

    train(Module, 3, limit_train_batches=3)
    expected = list(range(18))
    assert taken == [number % 5 for number in expected] if make is batches else taken == expected
