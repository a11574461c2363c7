"""Lists that steps append to: in the order of the batch, wherever they are kept."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow


def test_one_item_for_every_sample(Regression, train):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.errors, self.names = [], []

        def training_step(self, batch, batch_idx):
            X, y = batch
            errors = (self.net(X) - y).square().mean(1)
            self.errors.extend(errors.detach())
            self.names.extend(f"{value:.6f}" for value in X[:, 0])
            return errors.mean()

    one, *others = [train(Module, k) for k in (1, 2, 3)]
    for other in others:
        torch.testing.assert_close(other.errors, one.errors, rtol=1e-9, atol=0)
        assert other.names == one.names


def test_lists_in_the_body_of_a_class(Regression, train):
    """All objects of the class share them; replicas must not, or what they append would be mixed up."""

    class Base(nn.Module):
        seen: list = []  # noqa: RUF012

        def forward(self, X):
            for row in X:
                self.seen.append(row.sum().item())
            return X

    def run(k):
        class Module(Regression):
            inputs, targets, counts = [], [], {}

            def __init__(self):
                super().__init__(nn.Sequential(Base(), nn.Linear(6, 3)))
                self.own = self.targets

            def training_step(self, batch, batch_idx):
                for x, y in zip(*batch):
                    self.inputs.append(x[0].item())
                    self.targets.append(y[1].item())  # the same number
                self.counts.setdefault(batch_idx, []).append(len(batch[0]))
                return self.loss(batch)

        Base.seen.clear()
        train(Module, k)
        return Module, list(Base.seen)

    one, seen = run(1)
    for k in (2, 3):
        other, seen_by_others = run(k)
        assert other.inputs == one.inputs == other.targets
        assert seen_by_others == seen
        assert {key: sum(sizes) for key, sizes in other.counts.items()} == {
            key: sum(sizes) for key, sizes in one.counts.items()
        }


class Kept:
    def __init__(self):
        self.inputs, self.by_input, self.last = [], {}, {}


def test_long_lists_in_objects(Regression, train, make_loader):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.kept = Kept()

        def training_step(self, batch, batch_idx):
            for n, x in enumerate(batch[0]):
                self.kept.inputs.append(x[0].item())
                self.kept.by_input[x[0].item(), self.current_epoch] = n < 0
                self.kept.last.pop(batch_idx - 20, None)
                self.kept.last[batch_idx] = self.current_epoch
            return self.loss(batch)

    one, *others = [train(Module, k, loader=make_loader(num_samples=240)) for k in (1, 2, 3)]
    assert len(one.kept.inputs) == 480
    for other in others:
        assert vars(other.kept) == vars(one.kept)
