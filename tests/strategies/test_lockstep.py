"""Manual optimization with one optimizer: steps, accumulation, batches without a loss, errors."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from lightning_mgpu.strategies import ManualAllreduceStrategy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_one_optimizer(Manual, assert_parity, profiler):
    assert_parity(Manual, (2, 3, 4), profiler=profiler)


def test_uneven_shares(Manual, assert_parity):
    """The last batch's only sample would go to replica 1, and replica 0 leads."""
    assert_parity(Manual, (2,), strategy=lambda: ManualAllreduceStrategy(split=[0.1, 0.9]))


def test_accumulation(Manual, assert_parity):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 3)
            if batch_idx % 3 == 2 or self.trainer.is_last_batch:
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                optimizer.zero_grad()

    assert_parity(Module)


def test_weights_clamped_in_the_step(Manual, assert_parity):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            for parameter in self.parameters():
                parameter.data.clamp_(-0.3, 0.3)

    assert_parity(Module)


def test_sharpness_aware_closures(Manual, assert_parity):
    """The closure runs twice in a step, the second time with other weights."""

    class Twice(optim.SGD):
        def step(self, closure=None):
            closure()
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            steps = [parameter.grad.detach() * 0.1 for parameter in parameters]
            for parameter, step in zip(parameters, steps):
                parameter.data.add_(step)
            closure()
            for parameter, step in zip(parameters, steps):
                parameter.data.sub_(step)
            super().step()

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss.detach()

            optimizer.step(closure)

    for optimizer in (
        lambda m: Twice(m.parameters(), 0.1, momentum=0.9),
        lambda m: optim.LBFGS(m.parameters(), 0.1, max_iter=4, line_search_fn="strong_wolfe"),
    ):
        assert_parity(lambda optimizer=optimizer: Module(optimizer=optimizer), tolerance=1e-9)


def test_torch_optimizers_stepped_directly(Manual, assert_parity):
    """`optimizers(use_pl_optimizer=False)` gives torch's; every replica then steps its own."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_parity(Module, num_devices=(2,))


def test_progress_counts_a_step_once(Manual, train):
    assert train(Manual, 2).trainer.global_step == train(Manual).trainer.global_step == 8


def test_sync_batchnorm(Manual, assert_parity):
    def make():
        return Manual(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))

    assert_parity(make, sync_batchnorm=True, limit_train_batches=3)


@pytest.mark.parametrize("joint", [False, True])
def test_shards_without_a_loss_and_skipped_batches(Manual, assert_parity, joint):
    """Nothing to learn from in one of the shards, or, as in the third batch, nothing that is differentiated."""

    class Module(Manual):
        def loss(self, batch):
            X, y = batch
            rows = X[:, 0] > 0.5
            return F.mse_loss(self.net(X[rows]), y[rows], reduction="sum") / len(X) if rows.any() else X.new_zeros(())

        def training_step(self, batch, batch_idx):
            if batch_idx != 2:
                return super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.optimizers().step()

    if joint:
        Module.backward = lambda self, loss: loss.backward()
    assert_parity(Module, (2, 4), limit_train_batches=3)


def test_optimization_by_hand_from_the_second_epoch(Manual, assert_parity):
    class Module(Manual):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

        def on_train_epoch_start(self):
            self.automatic_optimization = self.current_epoch != 1

        def training_step(self, batch, batch_idx):
            return self.loss(batch) if self.automatic_optimization else super().training_step(batch, batch_idx)

    assert_parity(Module, max_epochs=3)


def test_an_exception_names_its_replica(Manual, train):
    class Module(Manual):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if self is not self.trainer.strategy.original:
                raise ArithmeticError("what the user's code says")

    with pytest.raises(ArithmeticError, match="what the user's code says") as info:
        train(Module, 2)
    assert "replica 1" in " ".join(getattr(info.value, "__notes__", info.value.args))
    assert torch.get_num_threads() == 1
