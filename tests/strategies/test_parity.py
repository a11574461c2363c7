"""Training on two devices is training on one device, in float64.

Every case is a kind of model, optimizer or hook for which data parallelism could go wrong.
test_dp.py runs them under `dp`. What any strategy promises is in tests/test_promises.py.
"""

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import Case, Manual, check
from tests.strategies.conftest import Net, samples, world_size


class Plain(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Searches(Net):
    def configure_optimizers(self):
        options = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
        return torch.optim.LBFGS(self.parameters(), **options)


class Frozen(Net):
    """The first layer trains in every second epoch, the last in the others, and one never."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def on_train_epoch_start(self):
        for i in (0, 2):
            self.net[i].requires_grad_((self.current_epoch + i // 2) % 2 == 1)


class Tied(Net):
    """Layers with one weight, and two weights to which autograd gives views of one gradient."""

    def __init__(self):
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        super().__init__(nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(8, 3)))
        self.a, self.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

    def loss(self, batch):
        return super().loss([batch[0] @ (self.a + self.b.t()), batch[1]])


class Replaced(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0] = nn.Linear(8, 16)
            self.net[2] = nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3))
            self.to(self.device, torch.float64)
            optimizer = self.optimizers()
            for i in (0, 2):
                optimizer.add_param_group({"params": list(self.net[i].parameters())})


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])
        self.lstm = nn.LSTM(1, 8, batch_first=True)

    def loss(self, batch):
        features = self.lstm(batch[0][..., None])[0][:, -1]
        return F.cross_entropy(checkpoint(self.net, features, use_reentrant=False), batch[1])


class Edited(Net):
    def on_train_batch_end(self, *args):
        for p in self.parameters():
            p.data.mul_(0.99)

    def on_before_zero_grad(self, optimizer):
        self.net[0].weight.data.clamp_(-0.3, 0.3)

    def on_after_backward(self):
        self.net[2].weight.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer):
        self.net[0].bias.grad = self.net[0].bias.grad * 2


class HalvesGradients(Net):
    """A hook that replaces gradients, and edits some by `.data`, in every batch of a window."""

    def on_after_backward(self):
        for p in self.net[0].parameters():
            p.grad = p.grad * 0.5
        for p in self.net[2].parameters():
            p.grad.data.mul_(0.5)


class KeepsMask(Net):
    def block(self, X):
        return self.net[0](X) * self.mask

    def loss(self, batch):
        self.mask = torch.sigmoid(3 * batch[0]).repeat(1, 2)
        X = checkpoint(self.block, batch[0], use_reentrant=False)
        return F.cross_entropy(self.net[1:](X), batch[1])


class ClipsWeights(Net):
    def loss(self, batch):
        if self.global_step >= 2:
            for p in self.parameters():
                p.data.clamp_(-0.2, 0.2)
        return super().loss(batch)


class FlatSGD(torch.optim.Optimizer):
    """SGD on one flat gradient: `zero_grad` makes each `p.grad` a view of it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})
        self.given = self.param_groups[0]["params"]
        sizes = [p.numel() for p in self.given]
        self.flat = self.given[0].new_zeros(sum(sizes))
        self.parts = self.flat.split(sizes)

    def zero_grad(self, set_to_none=True):
        self.flat.zero_()
        for p, part in zip(self.given, self.parts):
            p.grad = part.view_as(p)

    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        for p, part in zip(self.given, self.parts):
            p.sub_(part.view_as(p), alpha=0.5)
        return loss


class FlatGradient(Net):
    def configure_optimizers(self):
        return FlatSGD(self.parameters())


class EmptyFirst(Net):
    def __init__(self):
        super().__init__()
        net = self.net
        del self.net
        self.condition, self.net = nn.Linear(0, 3, bias=False), net

    def loss(self, batch):
        y = self.net(batch[0]) + self.condition(batch[0][:, :0])
        return F.cross_entropy(y, batch[1])


class LeavesEarly(Net):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class PenalisedGradient(Net):
    def loss(self, batch):
        loss = super().loss(batch)
        gradients = torch.autograd.grad(loss, [*self.net.parameters()], create_graph=True)
        return loss + 0.1 * sum(gradient.sum() for gradient in gradients)


class ChannelsLast(Net):
    """`fused=True` reads a gradient in the order of its parameter."""

    def __init__(self):
        super().__init__(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0].view(-1, 2, 2, 2)).flatten(1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, fused=True)


class GAN(Manual):
    def __init__(self):
        super().__init__()
        self.net, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        fake = self.net(batch[0])
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.critic(fake).mean())
        self.clip_gradients(first, 0.1)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        is_real = self.critic(batch[0]).sigmoid().mean()
        self.manual_backward(self.critic(fake.detach()).sigmoid().mean() - is_real)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        nets = (self.net, 0.01), (self.critic, 0.02)
        return [torch.optim.AdamW(net.parameters(), lr) for net, lr in nets]


class AccumulatesByHand(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        y = self.net(batch[0])
        self.manual_backward(F.cross_entropy(y, batch[1]), retain_graph=True)
        self.manual_backward(y.square().mean())
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class ExchangesOnce(Manual):
    """Gradients of four batches are accumulated by hand, and exchanged with the last one.

    The second window begins in the first epoch, and ends in the second one.
    """

    num_batches = 0

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.num_batches += 1
        is_last = self.num_batches % 4 == 0
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch), create_graph=True)
        if is_last:
            # else the graphs of all steps would stay in memory
            assert world_size() == 1 or not self.net[0].weight.grad.requires_grad
            optimizer.step()
            optimizer.zero_grad()


class TiedByHand(Manual, Tied):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


class NeverZeroes(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(0.01 * self.loss(batch))
        if batch_idx % 2 == 1:
            optimizer.step()


class OneAccumulates(Manual):
    """The first layer's optimizer steps in every third batch, the last layer's in each.

    Which is the first to compute gradients, and when they are zeroed, changes with the epoch.
    """

    def step_rarely(self, batch, batch_idx):
        optimizer = self.optimizers()[0]
        is_last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    def step_always(self, batch, is_zeroed_late):
        optimizer = self.optimizers()[1]
        with optimizer.toggle_model():
            if is_zeroed_late:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if not is_zeroed_late:
                optimizer.zero_grad()

    def training_step(self, batch, batch_idx):
        epoch = self.current_epoch
        if epoch < 2:
            self.step_rarely(batch, batch_idx)
        self.step_always(batch, epoch % 2 == 1)
        if epoch >= 2:
            self.step_rarely(batch, batch_idx)

    def on_train_epoch_end(self):
        for optimizer in self.optimizers():
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), 0.5, momentum=0.9) for i in (0, 2)]


def half(**kwargs):
    """Float32 samples, of which one overflows: a GradScaler leaves that step out."""
    X, y = samples().tensors
    X[20] = 1e38 if "plugins" in kwargs else X[20]
    return {**kwargs, "data": DataLoader(TensorDataset(X.float(), y), 10), "precision": None}


CASES = {
    "lbfgs": Case(Searches, is_for_one=True, rtol=1e-6),
    "frozen, accumulated": Case(Frozen, lambda: {"max_epochs": 3, "accumulate_grad_batches": 2}),
    "tied": Case(Tied),
    "replaced layers": Case(Replaced),
    "lstm": Case(Recurrent),
    "edited": Case(Edited),
    "halves gradients": Case(HalvesGradients, lambda: {"accumulate_grad_batches": 3}),
    "keeps a mask": Case(KeepsMask),
    "clips weights": Case(ClipsWeights),
    "flat gradient": Case(FlatGradient),
    "flat gradient, accumulated": Case(FlatGradient, lambda: {"accumulate_grad_batches": 2}),
    "empty first parameter": Case(EmptyFirst),
    "leaves early": Case(LeavesEarly, lambda: {"accumulate_grad_batches": 2}),
    "gradients of gradients": Case(PenalisedGradient),
    "swa": Case(
        Plain,
        lambda: {"callbacks": StochasticWeightAveraging(0.05, swa_epoch_start=1), "max_epochs": 4},
    ),
    "channels_last": Case(ChannelsLast),
    "gan": Case(GAN),
    "by hand": Case(AccumulatesByHand),
    "by hand, exchanged once": Case(ExchangesOnce),
    "by hand, tied": Case(TiedByHand),
    "by hand, never zeroed": Case(NeverZeroes),
    "by hand, one accumulates": Case(OneAccumulates, lambda: {"max_epochs": 4}),
    "bf16": Case(Plain, lambda: half(precision="bf16-mixed"), rtol=0.02),
    "GradScaler": Case(Plain, lambda: half(plugins=[MixedPrecision("16-mixed", "cpu")]), rtol=0.02),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_device(name, in_two_processes):
    check(__name__, name, in_two_processes)
