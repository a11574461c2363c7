"""Random numbers: reproducible from the seed, other ones in every replica, replayed by activation checkpointing."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.checkpoint import checkpoint


def net(norm=False):
    layers = [nn.Linear(6, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Dropout(0.5), nn.Linear(32, 3)]
    return nn.Sequential(*layers)


@pytest.fixture
def Dropping(Regression):
    """Keeps the dropout masks each replica drew."""

    class Module(Regression):
        def __init__(self, norm=False):
            super().__init__(net(norm))
            self.masks = []

        def training_step(self, batch, batch_idx):
            self.masks.append(self.net[2](torch.ones(4, 32, device=self.device)).ne(0))
            return self.loss(batch)

    return Module


def test_one_replica_draws_what_one_device_does(Dropping, train, engine):
    one, replica = train(Dropping), train(Dropping, strategy=engine)
    assert all(torch.equal(a, b) for a, b in zip(one.masks, replica.masks))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), replica.parameters()))


@pytest.mark.parametrize("kwargs", [{}, {"sync_batchnorm": True, "limit_train_batches": 3}])
def test_reproducible_and_different(Dropping, train, kwargs):
    first, second = (train(lambda: Dropping("sync_batchnorm" in kwargs), 3, **kwargs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
    masks = [mask.flatten().tolist() for mask in first.masks]
    assert len(masks) > 12
    assert len(set(map(tuple, masks))) == len(masks)  # of all steps and replicas


def test_replica_0_draws_what_one_device_does(Dropping, train):
    one, two = train(Dropping, limit_train_batches=1, max_epochs=1), train(Dropping, 2, limit_train_batches=1)
    assert torch.equal(one.masks[0], two.masks[0])
    assert not torch.equal(two.masks[0], two.masks[1])


@pytest.mark.parametrize(("k", "is_taken"), [(3, True), (2, False)])
def test_streams_of_another_run(Dropping, train, k, is_taken):
    """A resumed run draws what the one before would have, if it has as many replicas."""
    saved = train(Dropping, 3).trainer.strategy.random_state()
    strategy = train(Dropping, k, max_epochs=1).trainer.strategy
    before = strategy.random_state()
    strategy.set_random_state(saved)
    state = strategy.random_state()
    assert len(before["streams"]) == k - 1 and before["draws"]["training_step"]
    torch.testing.assert_close(state, saved if is_taken else before, rtol=0, atol=0)
    assert not torch.equal(before["streams"][0][0], saved["streams"][0][0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("manual", [False, True])
def test_activation_checkpointing(Regression, train, use_reentrant, manual):
    """The masks of the forward pass again in the backward pass: nothing changes but memory."""

    class Module(Regression):
        def __init__(self, checkpointed):
            super().__init__(nn.Sequential(nn.Linear(6, 6), net()))
            self.checkpointed, self.automatic_optimization = checkpointed, not manual

        def training_step(self, batch, batch_idx):
            X, y = batch
            X = self.net[0](X)
            for _ in range(3):
                # dropout and a wide layer, so that backward passes of replicas overlap
                X = X + (checkpoint(self.block, X, use_reentrant=use_reentrant) if self.checkpointed else self.block(X))
            loss = (X[:, :3] - y).square().mean()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def block(self, X):
            return self.net[1](X).repeat(1, 2) * 0.1

    plain, checkpointed = (train(lambda c=c: Module(c), 3) for c in (False, True))
    for a, b in zip(plain.parameters(), checkpointed.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_random_numbers_in_parallel_backward_passes(Regression, train, monkeypatch):
    """Without a lock around the replay, replicas would get each other's random numbers."""
    inside, most, fork_rng = set(), [], torch.random.fork_rng

    @contextlib.contextmanager
    def slow(*args, **kwargs):
        inside.add(threading.get_ident())
        most.append(len(inside))
        try:
            with fork_rng(*args, **kwargs):
                yield
        finally:
            time.sleep(0.005)
            inside.discard(threading.get_ident())

    monkeypatch.setattr(torch.random, "fork_rng", slow)

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            return checkpoint(self.loss, batch, use_reentrant=False)

    train(lambda: Module(net()), 3, max_epochs=1)
    assert len(most) > 4
    assert max(most) == 1
    assert torch.random.fork_rng is slow  # put back


@pytest.mark.parametrize("hook", ["in an object", "__init__", "on_fit_start", "on_train_epoch_start"])
def test_generators_of_the_modules_own(Regression, train, hook):
    """Replica 0 draws from it, the others from streams of their own; a hook that seeds it begins those again, too."""

    class Noisy(Regression):
        def __init__(self):
            super().__init__()
            self.drawn, self.generator = [], torch.Generator().manual_seed(3)
            self.source = SimpleNamespace(generator=self.generator)

        def training_step(self, batch, batch_idx):
            X, y = batch
            generator = self.source.generator if hook == "in an object" else self.generator
            noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
            self.drawn.append(noise)
            return self.loss([X + noise.to(X.device), y])

    def seed(self):
        self.generator.manual_seed(3)

    make = type("Module", (Noisy,), {hook: seed} if hook.startswith("on_") else {})
    first, second = (train(make, 2, limit_train_batches=3).drawn for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(first[0], torch.randn((4, 6), generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    noises = [noise.sum().item() for noise in first]  # of 3 steps of 2 replicas, twice
    assert len(set(noises[:6])) == 6
    assert (noises[:6] == noises[6:]) == (hook == "on_train_epoch_start")


def test_random_numbers_in_one_backward_pass_for_all(Regression, train):
    """Autograd runs several GPUs' parts of it side by side; with synchronised BatchNorm there is one on CPUs, too."""
    locked, fork_rng = [], torch.random.fork_rng

    class Module(Regression):
        def __init__(self, manual):
            super().__init__(net(norm=True))
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            X = checkpoint(self.scale, batch[0].requires_grad_(), use_reentrant=False)
            loss = self.loss([X, batch[1]])
            if not self.automatic_optimization:
                self.manual_backward(loss)
            return loss

        def scale(self, X):
            if torch._C._current_graph_task_id() != -1:
                locked.append(torch.random.fork_rng is not fork_rng)
            return X.sin()

    for manual in (False, True):
        train(lambda manual=manual: Module(manual), 2, sync_batchnorm=True, max_epochs=1, limit_train_batches=3)
    assert len(locked) == 12
    assert all(locked)


@pytest.mark.parametrize("by", ["torch", "lightning"])
def test_random_numbers_of_a_fork(Regression, train, by):
    """Noise that is always the same: nothing outside of the step notices, whatever the threads do."""
    fork = {"torch": torch.random.fork_rng, "lightning": isolate_rng}[by]

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            with fork():
                torch.manual_seed(5)
                time.sleep(0.002 * (batch_idx % 3))
                noise = torch.randn(4, 6, dtype=torch.float64)
                time.sleep(0.002)
                self.noise = noise, torch.randn(4, 6, dtype=torch.float64)
            X, y = batch
            X = X + (self.noise[0] + self.noise[1])[: len(X)].to(X.device)
            return self.loss((X, y))

        def on_train_batch_end(self, *_):
            assert torch.equal(torch.get_rng_state(), self.state)

        def on_train_batch_start(self, *_):
            torch.rand(3)
            self.state = torch.get_rng_state()

    first, *others = (train(Module, 3) for _ in range(3))
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(first.noise[0], torch.randn(4, 6, dtype=torch.float64, generator=generator))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
