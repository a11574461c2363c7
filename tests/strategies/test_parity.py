"""Training on two and three devices is training on one: models, steps, a Trainer's options."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from tiny_runs import MANUAL, Manual, Regression, a_loader, make_strategy, same_bits
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from lightning_mgpu.strategies import ManualAllreduceStrategy


def net(*layers):
    return lambda: Regression(nn.Sequential(*(layer() for layer in layers)))


def step(training_step, base=Regression, **methods):
    return type("Module", (base,), {"training_step": training_step, **methods})


class Scaled(nn.Module):
    """Has a 0-d parameter, as CLIP's temperature is one."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, X):
        return self.net(X) * self.scale.exp()


class Sometimes(Regression):
    """Parameters that are frozen, unused, or used where a sample is large."""

    def __init__(self):
        super().__init__(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01, weight_decay=0.5))
        self.unused, self.sometimes = (
            nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)
        )
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        X, _ = batch
        large = X[:, 0] > 1.0
        loss = self.loss(batch)
        return loss + (X[large, :3] * self.sometimes).sum() / len(X) if large.any() else loss


def tied():
    module = Regression(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    module.net[2].weight = module.net[0].weight
    return module


class AddedUp(Regression):
    """Autograd gives views of one tensor to parameters that are added up."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(1, 3).double()) for _ in range(2))

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]) @ (self.a.t() + self.b.t()), batch[1][:, :1])


class SparselyEmbedded(Regression):
    def __init__(self):
        super().__init__(
            nn.Embedding(12, 3, sparse=True), lambda m: optim.SparseAdam(m.parameters(), 0.05)
        )

    def loss(self, batch):
        X, y = batch
        return F.mse_loss(self.net((X.abs() * 4).long().clamp(max=11)).sum(1), y)


class Recurrent(Regression):
    def __init__(self):
        super().__init__(nn.LSTM(2, 5, batch_first=True))
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def loss(self, batch):
        return F.mse_loss(self.head(self.net(batch[0].view(-1, 3, 2))[0][:, -1]), batch[1])


class Inner(LightningModule):
    """Finds its trainer from inside another module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, X):
        assert self.trainer.training and X.device == self.device
        return self.net(X)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        layers = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double().eval())
    return Regression(nn.Sequential(layers, nn.Linear(6, 3)))


def compiled():
    module = Regression()
    module.net = torch.compile(module.net, backend="aot_eager")
    return module


def instance_norm():
    return nn.InstanceNorm1d(2, affine=True, track_running_stats=True)


MODELS = {
    "0-d parameters": lambda: Regression(Scaled()),
    "frozen, unused and sometimes used": Sometimes,
    "tied": tied,
    "gradients in one place": AddedUp,
    "spectral norm": net(lambda: spectral_norm(nn.Linear(6, 8)), lambda: nn.Linear(8, 3)),
    "instance norm": net(
        lambda: nn.Unflatten(1, (2, 3)), instance_norm, nn.Flatten, lambda: nn.Linear(6, 3)
    ),
    "sparse embedding": SparselyEmbedded,
    "lstm": Recurrent,
    "another LightningModule inside": lambda: Regression(Inner()),
    "scripted layers": scripted,
    "compiled layers": compiled,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(assert_parity, name):
    modules = assert_parity(MODELS[name])
    if name == "tied":
        assert all(module.net[2].weight is module.net[0].weight for module in modules)


def second_order(self, batch, batch_idx):
    X = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(self.net(X).square().sum(), X, create_graph=True)
    return self.loss(batch) + gradient.square().mean()


def looks_at_the_trainer(self, batch, batch_idx):
    assert self.trainer.model is self and self.trainer.strategy.model is self
    assert batch[0].device == self.device and self.trainer.num_training_batches == 4
    rate = self.optimizers().param_groups[0]["lr"]
    return self.loss(batch) * (1 + self.current_epoch + self.global_step + batch_idx + rate)


def clamps_weights(self, batch, batch_idx):
    for parameter in self.parameters():
        parameter.data.clamp_(-0.3, 0.3)
    return self.loss(batch)


STEPS = {
    "no loss in batch 2": step(
        lambda self, batch, batch_idx: None if batch_idx == 2 else self.loss(batch)
    ),
    "second-order gradients": step(second_order),
    "looks at the trainer": step(looks_at_the_trainer),
    "clamps weights": step(clamps_weights),
    "a shape of one element": step(lambda self, batch, _: self.loss(batch).view(1)),
}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", STEPS)
def test_steps(assert_parity, name, accumulate):
    assert_parity(STEPS[name], accumulate_grad_batches=accumulate)


SETTINGS = [
    {"gradient_clip_val": 0.05, "own_updates": True},
    {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
    {"accumulate_grad_batches": 2, "max_steps": 3},
    {"overfit_batches": 2},
    {"val_check_interval": 2, "num_sanity_val_steps": 2, "val": True},
    {"detect_anomaly": True},
    {"inference_mode": False, "val": True},
]


@pytest.mark.parametrize("kwargs", SETTINGS, ids=str)
def test_settings(assert_parity, kwargs):
    assert_parity(
        lambda: Regression(optimizer=lambda m: optim.AdamW(m.parameters(), 0.01)), **kwargs
    )


@pytest.mark.parametrize("kind", [Regression, Manual])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_sizes_of_batches(assert_parity, kind, batch_size):
    """Fewer samples than devices, and shards that are uneven."""
    assert_parity(kind, (2, 4), loader=lambda: a_loader(batch_size, 15))


@pytest.mark.parametrize("kind", [Regression, Manual])
def test_one_replica_is_one_device(train, engine, kind):
    assert same_bits(train(kind, strategy=make_strategy(engine)), train(kind))


def books(data):
    """d2l.ai's, as it is today."""
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


@pytest.mark.parametrize("engine", [MANUAL], indirect=True)
def test_an_allreduce_of_ones_own(assert_parity):
    """It adds up parameters without dimensions, too."""
    make = MODELS["0-d parameters"]
    assert_parity(make, strategy=lambda: ManualAllreduceStrategy(books), own_updates=True)
