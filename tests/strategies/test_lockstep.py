"""Manual optimization with one optimizer: steps, closures, accumulation, batches without a loss, errors."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


def test_every_replica_is_given_the_result_of_a_step(Manual, train):
    """The closure's loss over the whole batch, as one device logs it."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            self.log("loss", 2 * optimizer.step(closure=closure), on_epoch=True)

    one, several = (train(Module, k).trainer.callback_metrics["loss_epoch"] for k in (1, 3))
    torch.testing.assert_close(several, one, rtol=1e-5, atol=0)


class Pairs(NamedTuple):
    samples: torch.Tensor
    mean: torch.Tensor
    nothing: None


def test_closures_that_return_more_than_a_loss(Manual, assert_parity):
    """The optimizer sees the whole batch's; the step what came of its own samples, and the whole batch's loss."""

    class Careful(optim.SGD):
        def step(self, closure=None):
            outputs = closure()
            self.seen = outputs["pairs"][0].cpu()
            if outputs["loss"] < 1e9:
                super().step()
            outputs["added"] = outputs["pairs"][1] + 1
            del outputs["left out"]
            assert closure().keys() == {"loss", "classes", "pairs", "left out"}  # another's, which is not returned
            return outputs

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                calls.append(loss)
                pairs = Pairs(batch[0] * 2 * len(calls), loss.detach() * 3, None)
                return {"loss": loss.view(1), "classes": loss.expand(101) / 2, "pairs": pairs, "left out": 1}

            calls = []
            outputs = optimizer.step(closure)
            assert len(calls) == 2 and outputs.keys() == {"loss", "classes", "pairs", "added"}
            samples, three, nothing = outputs["pairs"]
            assert torch.equal(samples, batch[0] * 2) and nothing is None
            loss = outputs["loss"].detach().view(())
            torch.testing.assert_close(torch.stack([three, outputs["added"] - 1]) / 3, loss.expand(2))
            torch.testing.assert_close(outputs["classes"].detach() * 2, loss.expand(101))
            self.log("squared", loss**2, on_epoch=True)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert torch.equal(self.trainer.optimizers[0].seen, batch[0].cpu() * 2)

        def configure_optimizers(self):
            return Careful(self.parameters(), 0.1)

    one, *others = assert_parity(Module)
    for other in others:
        found, expected = (module.trainer.callback_metrics["squared_epoch"] for module in (other, one))
        torch.testing.assert_close(found, expected)


@dataclasses.dataclass
class Outputs:
    hidden: torch.Tensor
    loss: torch.Tensor


def test_samples_of_a_closure_keep_their_graph_in_every_replica(Manual, assert_parity):
    """What is the whole batch's belongs to no replica: gradients of it end in torch's error, not in a part of them."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                hidden = self.net(batch[0])
                loss = (hidden - batch[1]).square().mean()
                self.manual_backward(loss, retain_graph=True)
                return Outputs(hidden, loss)

            optimizer.optimizer.factor = 0
            outputs = optimizer.step(closure)
            assert batch_idx or outputs.loss.requires_grad == (self.trainer.num_devices == 1)
            self.log("loss", outputs.loss.detach(), on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(outputs.hidden.square().mean())
            optimizer.optimizer.factor = 1
            optimizer.step()

        def configure_optimizers(self):
            return Returning(self.parameters(), 0.1)

    class Returning(optim.SGD):
        factor = 1

        def step(self, closure=None):
            outputs = closure() if closure else None
            if self.factor:
                super().step()
            return outputs

    one, *others = assert_parity(Module)
    for other in others:
        found, expected = (module.trainer.callback_metrics["loss_epoch"] for module in (other, one))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [lambda loss: loss.view(1), lambda loss: np.float32(loss.item())])
def test_losses_of_one_element(Manual, train, make):
    """A line search takes the loss of a shard of one sample for a number, too."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return make(loss.detach())

            self.log("loss", float(optimizer.step(closure)), on_epoch=True)

        def configure_optimizers(self):
            return optim.LBFGS(self.parameters(), max_iter=2)

    loader = DataLoader(TensorDataset(torch.randn(8, 6).double(), torch.randn(8, 3).double()), 2)
    one, two = (train(Module, k, loader=loader).trainer.callback_metrics["loss_epoch"] for k in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0)


def test_closures_that_differ_by_shard(Manual, assert_parity):
    """Of the last batch replica 1 has one sample: what it returns of that looks like a loss."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def step(output):
                def closure():
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    return output

                return optimizer.step(closure)

            size, first = len(batch[0]), self.team_index() == 0
            found = step(batch[0].sum(1))
            assert torch.equal(found, batch[0].sum(1))
            found = step(batch[0].sum(1, keepdim=True))
            assert torch.equal(found, batch[0].sum(1, keepdim=True))
            self.log("samples", float(step(size)), on_epoch=True, reduce_fx="max")
            assert step(torch.tensor(first)) and step(first)
            found = step(torch.tensor(3.0) if first else None)
            assert found == 3

        def team_index(self):
            return getattr(getattr(self.trainer.strategy, "team", None), "index", 0)

        def configure_optimizers(self):
            return optim.SGD(self.parameters(), 0.01)

    loader = DataLoader(TensorDataset(torch.randn(11, 6).double(), torch.randn(11, 3).double()), 4)
    for module in assert_parity(Module, (2,), loader=loader):
        assert module.trainer.callback_metrics["samples_epoch"] == 4
