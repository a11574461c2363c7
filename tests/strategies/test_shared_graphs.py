"""What hooks compute for a step, with a graph: every replica goes on with it, and one backward pass reaches it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow

PLACES = {
    "attribute": lambda w: w,
    "list": lambda w: [w],
    "tuple in a dict": lambda w: {"w": (w, 1)},
}


def tensor_in(place):
    while not isinstance(place, torch.Tensor):
        place = place["w"] if isinstance(place, dict) else place[0]
    return place


@pytest.fixture
def Computed(Regression):
    """Its weights are made by another layer, once for all replicas."""

    class Module(Regression):
        def __init__(self, kind="attribute", hook="on_train_batch_start"):
            super().__init__()
            self.maker = nn.Linear(3, 3 * 6, dtype=torch.float64)
            self.kind = kind
            setattr(self, hook, self.compute)

        def compute(self, batch, *_):
            basis = torch.eye(3, dtype=torch.float64, device=self.device)
            self.made = PLACES[self.kind](self.maker(basis).sum(0).reshape(3, 6).tanh())
            return batch

        def loss(self, batch):
            X, y = batch
            return F.mse_loss(self.net(X) + F.linear(X, tensor_in(self.made).to(X.device)), y)

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    return Module


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_batch_transfer"])
def test_weights_that_a_hook_computes(Computed, assert_parity, hook, kind):
    assert_parity(lambda: Computed(kind, hook))


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_with_settings_of_the_trainer(Computed, assert_parity, settings):
    assert_parity(Computed, **settings)


def test_two_steps_go_on_with_it(Computed, assert_parity):
    """In manual optimization, which keeps the graph; the second `manual_backward` reaches it, too."""

    class Module(Computed):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch), retain_graph=True)
            optimizer.step()

    assert_parity(Module)


@pytest.mark.parametrize("collects", [True, False])
def test_what_steps_compute_is_nobody_elses(Regression, trainer_on, make_loader, monkeypatch, collects):
    """Then CPU replicas run their backward passes side by side."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.losses, self.last = [], {}

        def training_step(self, batch, batch_idx):
            self.loss_now = loss = self.loss(batch)
            if collects:
                self.losses.append(loss)
            self.last["loss"] = loss
            return loss

    trainer = trainer_on(2, limit_val_batches=0)
    side_by_side, run = [], type(trainer.strategy)._backward_in_threads
    monkeypatch.setattr(
        type(trainer.strategy), "_backward_in_threads", lambda *args: (side_by_side.append(1), run(*args))
    )
    trainer.fit(Module(), make_loader(batch_size=12, num_samples=48))
    assert len(side_by_side) == trainer.global_step > 3
