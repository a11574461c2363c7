"""Gradients and optimizer states that replicas get when a step looks at them: in whatever way."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import Manual, Regression, sgd
from torch import nn
from torch.nn import functional as F

BASES = pytest.mark.parametrize("base", [Regression, Manual])
KIND = "sim" if hasattr(torch, "sim") else "cpu"


def asks(self, state):
    """Remembers where each weight was at first, if it does not yet."""
    pull = 0
    for p in self.parameters():
        if p not in state:
            state[p]["anchor"] = p.detach().clone()
        pull = pull + (p - state[p].get("anchor", 0)).square().sum()
    return pull


def gets(self, state):
    return sum((p * state.get(p, {}).get("momentum_buffer", 1)).sum() for p in self.parameters())


def sets_a_default(self, state):
    return sum(
        state.setdefault(p, {"scale": 3.0}).get("scale", 1) * p.sum() for p in self.parameters()
    )


def counts(self, state):
    assert isinstance(copy.copy(state), dict) and len(state) == len(state.keys())
    return self.net[0].weight.sum() * sum(
        "momentum_buffer" in of_param for of_param in state.values()
    )


@BASES
@pytest.mark.parametrize("look", [asks, gets, sets_a_default, counts])
def test_ways_to_look_at_a_state(assert_parity, look, base):
    """With a hook of the user's, so that replicas make no updates of their own."""

    class Module(base):
        def loss(self, batch):
            return super().loss(batch) + 0.1 * look(self, self.optimizers().optimizer.state)

        def on_train_batch_end(self, *args):
            pass

    assert_parity(Module)


def test_a_copy_of_an_optimizer_looks_ahead(assert_parity):
    """It has a state of its own."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            net, optimizer = copy.deepcopy((self.net, self.optimizers().optimizer))
            optimizer.zero_grad()
            F.mse_loss(net(torch.ones_like(batch[0][:1])), torch.ones_like(batch[1][:1])).backward()
            optimizer.step()
            ahead = sum(
                (p - q.detach()).square().sum()
                for p, q in zip(self.net.parameters(), net.parameters())
            )
            return self.loss(batch) + ahead

    assert_parity(Module)


def test_a_state_after_an_update_in_the_step(assert_parity):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            for _ in range(2):
                state = self.optimizers().optimizer.state
                momenta = [
                    state[p]["momentum_buffer"]
                    for p in self.parameters()
                    if "momentum_buffer" in state[p]
                ]
                pull = sum((p * momentum).sum() for p, momentum in zip(self.parameters(), momenta))
                self.update(self.loss(batch) + 0.1 * pull)

    assert_parity(Module)


def scaled():
    return MixedPrecision("16-mixed", KIND, torch.amp.GradScaler(KIND, init_scale=1024.0))


def in_single(base):
    class Single(base):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 3)), sgd)
            self.float()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [part.float() for part in batch]

    return Single


@BASES
def test_a_scaler_leaves_its_factor_in_no_replica(assert_parity, base):
    """It unscales gradients in place, which torch does not count as an edit."""

    class Module(in_single(base)):
        def loss(self, batch):
            pulls = [(p * p.grad).sum() for p in self.parameters() if p.grad is not None]
            return super().loss(batch).float() + 0.1 * sum(pulls)

    assert_parity(Module, tolerance=0.03, plugins=scaled)


def test_a_gradient_that_an_epochs_hook_edits(assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            pulls = [(p * p.grad).sum() for p in self.parameters() if p.grad is not None]
            return self.loss(batch) + 0.1 * sum(pulls)

    def halve(trainer, module):
        for p in module.parameters():
            p.grad.data.mul_(0.5)

    assert_parity(Module, callbacks=lambda: [LambdaCallback(on_train_epoch_end=halve)])


def test_a_sparse_buffer(assert_parity):
    """The adjacency matrix of a graph, for example: it is copied by itself."""
    if KIND == "sim":
        pytest.skip("the simulated devices have no sparse tensors")

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(6, dtype=torch.float64).to_sparse())

        def loss(self, batch):
            return super().loss([(self.adjacency @ batch[0].T).T, batch[1]])

    assert_parity(Module)
