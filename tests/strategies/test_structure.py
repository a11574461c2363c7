"""What models are made of: pruned weights, layers replaced in the middle of a run, layers that are hard to copy."""

import copy
import threading
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import nn, optim
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricTracker

from lightning_mgpu.strategies.replicas.replicas import Replicas


class Replace(Callback):
    """Puts a new last layer in place of the old one when a hook is called for the n-th time."""

    def __init__(self, hook, n):
        self.num_calls, self.n = 0, n
        setattr(self, hook, self.count)

    def count(self, trainer, module, *_):
        self.num_calls += 1
        if self.num_calls == self.n:
            torch.manual_seed(2)
            module.net[2] = nn.Linear(8, 3).double().to(module.device)
            trainer.optimizers[0].add_param_group({"params": list(module.net[2].parameters())})


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_pruning(Regression, assert_parity, at_epoch_end):
    """Twice: a parameter becomes another one and a mask, then the mask changes."""

    def prune():
        when = {"prune_on_train_epoch_end": at_epoch_end}
        return [ModelPruning("l1_unstructured", parameter_names=["weight", "bias"], amount=0.2, **when)]

    kwargs = {"callbacks": prune, "max_epochs": 3, "val": True, "own_updates": True, "enable_checkpointing": False}
    modules = assert_parity(lambda: Regression(optimizer=lambda m: optim.Adam(m.parameters(), 0.01)), (2,), **kwargs)
    assert all((module.net[0].weight == 0).any() for module in modules)


@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_replaced_layer(Regression, assert_parity, kwargs):
    """Also between the batches of an accumulation window, whose gradients count."""
    assert_parity(Regression, (2,), callbacks=lambda: [Replace("on_train_batch_start", 6)], **kwargs)


def test_replaced_before_a_validation(Regression, assert_parity):
    """Which makes the new replicas; they are trained afterwards."""
    assert_parity(Regression, (2,), callbacks=lambda: [Replace("on_validation_start", 1)], val=True, max_epochs=3)


def test_replaced_layer_in_manual_optimization(Regression, assert_parity):
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_parity(Manual, (2,), callbacks=lambda: [Replace("on_train_batch_start", 6)])


def test_metrics_made_anew_are_no_layers():
    module = LightningModule()
    module.net, module.tracker = nn.Linear(2, 2), MetricTracker(MeanMetric(), maximize=True)
    replicas = Replicas(module, [torch.device("cpu")] * 2)
    module.tracker.increment()
    assert not replicas.has_new_structure()
    module.net = nn.Linear(2, 2)
    assert replicas.has_new_structure()


@pytest.mark.filterwarnings("error:The .grad attribute of a Tensor that is not a leaf")
def test_a_scripted_layer(Regression, assert_parity):
    """TorchScript keeps parameters and buffers in mappings that are no dicts."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double().eval()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit is deprecated
                self.scripted = torch.jit.script(layers)

        def training_step(self, batch, batch_idx):
            return self.loss([self.scripted(batch[0]), batch[1]])

    assert_parity(Module, (2,))


class Average(nn.Module):
    """An average of weights whose class wants arguments, so that `copy.deepcopy` cannot make it, as ema_pytorch's."""

    def __new__(cls, net, *args):
        return super().__new__(cls)

    def __init__(self, net):
        super().__init__()
        self.net, self.of, self.lock = copy.deepcopy(net).requires_grad_(False), [net], threading.Lock()

    @torch.no_grad()
    def update(self):
        for average, parameter in zip(self.net.parameters(), self.of[0].parameters()):
            average.lerp_(parameter, 0.5)


@pytest.mark.parametrize("manual", [False, True])
def test_layers_that_cannot_be_copied(Regression, assert_parity, manual):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.average = Average(self.net)
            self.register_buffer("scale", self.net[0].weight * 2)  # has a graph
            self.automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            X, y = batch
            loss = F.mse_loss(self.net(X) * self.scale.detach().mean(), y) + F.mse_loss(
                self.net(X), self.average.net(X)
            )
            if manual:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.average.update()

    assert_parity(Module)


def test_weights_cut_by_their_data(Regression, train):
    """The parameter stays the same object, with fewer rows and columns."""

    class Module(Regression):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net[0].weight.data = self.net[0].weight.data[:5].clone()
                self.net[0].bias.data = self.net[0].bias.data[:5].clone()
                self.net[2].weight.data = self.net[2].weight.data[:, :5].clone()
                for parameter in self.parameters():
                    parameter.grad = None

    one, *others = [
        train(lambda: Module(optimizer=lambda module: optim.SGD(module.parameters(), 0.1)), k) for k in (1, 2, 3)
    ]
    for other in others:
        torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=1e-10, atol=1e-14)
