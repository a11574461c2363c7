"""What a step finds through its Trainer, and optimizers that compute with tensors: on its own device."""

import pytest
import torch
from torch import optim
from torch.nn import functional as F

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("attribute", ["model", "strategy.model"])
def test_the_module_of_the_trainer(Regression, assert_parity, attribute):
    """A replica's step finds the replica."""

    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X, y = batch
            module = self.trainer
            for name in attribute.split("."):
                module = getattr(module, name)
            assert module is self
            return self.loss(batch) + F.mse_loss(module.net(X), y)

    assert_parity(Module)


def test_the_root_device(Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            X, y = batch
            device = self.trainer.strategy.root_device
            assert device == X.device == self.device
            weights = torch.arange(1.0, 4.0, dtype=torch.float64, device=device)
            return ((self.net(X) - y).square() * weights).mean()

    assert_parity(Module)


def test_settings_read_in_a_step(Regression, assert_parity):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            (group,) = self.optimizers().param_groups
            assert group["lr"].device == self.device
            return self.loss(batch) * (1 + group["lr"])

    def make():
        return Module(optimizer=lambda module: optim.SGD(module.parameters(), torch.tensor(0.1, device=module.device)))

    assert_parity(make)


class ScaledByLoss(optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad * loss * group["lr"])
        return loss


OPTIMIZERS = {
    "a tensor as learning rate": lambda module: optim.Adam(
        module.parameters(), torch.tensor(0.01, device=module.device), foreach=False
    ),
    "scaled by the loss": lambda module: ScaledByLoss(module.parameters(), 0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(Regression, assert_parity, kind):
    """Every replica updates itself with its own."""
    assert_parity(lambda: Regression(optimizer=OPTIMIZERS[kind]), own_updates=True)
