"""Metrics that are not registered, on the CPU or where the user has moved them, and logging in hooks of tensors."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

pytestmark = pytest.mark.slow

HOLDERS = {
    "list": (lambda metric: [metric], lambda held: held[0]),
    "list in a dict": (lambda metric: {"metrics": [metric]}, lambda held: held["metrics"][0]),
}


def make_metric(kind: str):
    metric = MeanSquaredError().set_dtype(torch.float64)
    return MetricCollection({"mse": metric}) if kind == "collection" else metric


@pytest.fixture
def assert_same_metrics(assert_parity):
    """Beside the weights: what has been logged, and what metrics gave at the end of every epoch."""

    def check(Module):
        one, *others = assert_parity(Module)
        expected = {name: float(value) for name, value in one.trainer.callback_metrics.items()}
        computed = getattr(one, "computed", [])
        assert expected or computed
        for other in others:
            metrics = {name: float(value) for name, value in other.trainer.callback_metrics.items()}
            assert metrics == pytest.approx(expected, rel=1e-6)
            assert getattr(other, "computed", []) == pytest.approx(computed, rel=1e-6)
        return one, *others

    return check


@pytest.mark.parametrize("kind", ["metric", "collection"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    ("place", "is_logged"), [("CPU", False), ("CPU", True), ("moved", True), ("made in setup", True)]
)
def test_metrics_that_are_not_registered(Regression, assert_same_metrics, holder, kind, place, is_logged):
    put, get = HOLDERS[holder]

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.held, self.computed = put(make_metric(kind)), []

        def setup(self, stage):
            if place == "made in setup":
                self.held = put(make_metric(kind).to(self.trainer.strategy.root_device))

        def on_fit_start(self):
            if place == "moved":
                get(self.held).to(self.device)

        def training_step(self, batch, batch_idx):
            X, y = batch
            Z = self.net(X).detach()
            values = (Z.cpu(), y.cpu()) if place == "CPU" else (Z, y)
            metric = get(self.held)
            if not is_logged:
                metric.update(*values)
            elif kind == "metric":
                self.log("mse", metric(*values), on_step=True, on_epoch=True)
            else:
                self.log_dict(metric(*values), on_step=True, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self):
            metric = get(self.held)
            value = metric.compute()
            self.computed.append(float(value["mse"] if kind == "collection" else value))
            metric.reset()

    one, *others = assert_same_metrics(Module)
    metrics = [get(module.held) for module in (one, *others)]
    metrics = [metric["mse"] if kind == "collection" else metric for metric in metrics]
    assert {metric.device for metric in metrics} == {metrics[0].device}
    assert metrics[0].device.type == "cpu" or place != "CPU"


def test_registered_metrics_given_values_on_the_cpu(Regression, assert_same_metrics):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.mean.update(loss.detach().cpu(), len(batch[0]))
            self.log("mean", self.mean, on_epoch=True)
            return loss

    assert_same_metrics(Module)


def test_values_on_the_cpu(Regression, assert_same_metrics):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss.detach().cpu(), on_step=True, on_epoch=True)
            self.log_dict({"largest": batch[1].max().cpu()}, reduce_fx="max", on_epoch=True)
            return loss

    assert_same_metrics(Module)


def log_gradient(module, tensor):
    """On a GPU, autograd calls the hook in a thread of its own."""
    tensor.register_hook(lambda gradient: module.log("gradient", gradient.abs().max(), on_epoch=True, reduce_fx="max"))


def test_logging_in_hooks_of_tensors(Regression, assert_same_metrics):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X = batch[0].clone().requires_grad_()
            log_gradient(self, X)
            torch.autograd.grad(self.loss((X, batch[1])) * len(X), X)
            return self.loss(batch)

    assert_same_metrics(Module)


@pytest.mark.parametrize("where", ["hook of a tensor", "checkpoint"])
def test_logging_in_manual_backward(Manual, assert_same_metrics, where):
    """A function that is checkpointed logs again while its values are computed anew."""

    class Module(Manual):
        def forward(self, X):
            Z = self.net(X)
            self.log("mean", Z.mean(), on_epoch=True)
            return Z

        def loss(self, batch):
            X, y = batch
            if where == "checkpoint":
                return F.mse_loss(checkpoint(self, X, use_reentrant=False), y)
            Z = self.net(X)
            log_gradient(self, Z)
            return F.mse_loss(Z, y)

    assert_same_metrics(Module)


def test_metrics_updated_in_hooks_of_layers(Manual, assert_same_metrics):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.mean, self.computed = MeanMetric(), []
            self.net[2].register_full_backward_hook(self.update)

        def update(self, layer, grad_input, grad_output):
            self.mean.update(grad_output[0].abs().mean())

        def on_train_epoch_end(self):
            self.computed.append(float(self.mean.compute()))
            self.mean.reset()

    assert_same_metrics(Module)
