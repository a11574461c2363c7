"""Closures of manual optimization: what the optimizer sees of what they return, and what the step is given back."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.slow


@pytest.fixture
def Closing(Manual):
    """Makes a step with a closure that returns `outputs`; what the step returns goes to `after`."""

    class Module(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return self.outputs(batch, loss)

            self.after(optimizer.step(closure=closure), batch)

    return Module


def test_every_replica_is_given_the_result_of_a_step(Closing, train):
    """The closure's loss over the whole batch, as one device logs it."""

    class Module(Closing):
        def outputs(self, batch, loss):
            return loss

        def after(self, result, batch):
            self.log("loss", 2 * result, on_epoch=True)

    one, several = (train(Module, k).trainer.callback_metrics["loss_epoch"] for k in (1, 3))
    torch.testing.assert_close(several, one, rtol=1e-5, atol=0)


class Pairs(NamedTuple):
    samples: torch.Tensor
    mean: torch.Tensor
    nothing: None


def test_closures_that_return_more_than_a_loss(Closing, assert_parity):
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

    class Module(Closing):
        def training_step(self, batch, batch_idx):
            self.calls = 0
            super().training_step(batch, batch_idx)

        def outputs(self, batch, loss):
            self.calls += 1
            pairs = Pairs(batch[0] * 2 * self.calls, loss.detach() * 3, None)
            return {"loss": loss.view(1), "classes": loss.expand(101) / 2, "pairs": pairs, "left out": 1}

        def after(self, outputs, batch):
            assert self.calls == 2 and outputs.keys() == {"loss", "classes", "pairs", "added"}
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
def test_losses_of_one_element(Closing, train, make):
    """A line search takes the loss of a shard of one sample for a number, too."""

    class Module(Closing):
        def outputs(self, batch, loss):
            return make(loss.detach())

        def after(self, result, batch):
            self.log("loss", float(result), on_epoch=True)

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
