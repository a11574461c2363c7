"""`manual_backward`: hooks on gradients and losses, gradients of some parameters, a `backward` of one's own."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

pytestmark = pytest.mark.slow


def test_hooks_on_gradients(Manual, assert_parity):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.02))

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(self.loss(batch))
            optimizer.step()

    class Look(Callback):
        def on_after_backward(self, trainer, module):
            module.net[2].weight.grad.data.clamp_(-0.02, 0.01)

    assert_parity(Module)
    assert_parity(Module, callbacks=lambda: [Look()])


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_gradients_of_some_parameters(Regression, assert_parity, sync_batchnorm):
    """`inputs` are each replica's own."""

    class Module(Regression):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
            self.automatic_optimization = False
            if not sync_batchnorm:
                self.net[1].eval()

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.net[1].train(sync_batchnorm)
            loss = self.loss(batch)
            self.manual_backward(loss, inputs=list(self.net[3].parameters()), retain_graph=True)
            self.manual_backward(loss, inputs=self.net[0].weight)
            optimizer.step()

    one, *_ = assert_parity(Module, sync_batchnorm=sync_batchnorm, limit_train_batches=3)
    assert one.net[0].weight.grad is not None and one.net[0].bias.grad is None


def test_backward_by_hand_is_refused(Manual, train):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            self.loss(batch).backward()
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="manual_backward"):
        train(Module, 2)


def test_backward_of_ones_own(Manual, assert_parity):
    class Module(Manual):
        def backward(self, loss):
            loss.backward()
            for parameter in self.parameters():
                parameter.grad.clamp_(-0.01, 0.02)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            assert all(parameter.grad.max() <= 0.02 for parameter in self.parameters())
            optimizer.step()

    assert_parity(Module)


@pytest.mark.parametrize("precision", ["64-true", "scaled"])
@pytest.mark.parametrize("own_backward", [False, True])
def test_hooks_see_the_whole_batchs_loss(Manual, train, precision, own_backward):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_before_backward(self, loss):
            self.seen.append(loss.item())

    if own_backward:
        Module.backward = lambda self, loss, *args, **kwargs: loss.backward(*args, **kwargs)
    scaled = {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))}
    kwargs = scaled if precision == "scaled" else {"precision": precision}
    one, *others = [train(Module, k, **kwargs) for k in (1, 2, 3)]
    for other in others:
        assert other.seen == pytest.approx(one.seen, rel=1e-3 if precision == "scaled" else 1e-12)
