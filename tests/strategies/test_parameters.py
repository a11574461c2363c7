"""Parameters that are frozen, unused, tied, sparse, added on the way or nobody's, and buffers."""

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn, optim
from torch.nn import functional as F

pytestmark = pytest.mark.slow


def test_layers_unfrozen_on_the_way(Regression, assert_parity):
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)

    def configure(module):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return optim.SGD(parameters, 0.1, momentum=0.9)

    one, *_ = assert_parity(lambda: Regression(optimizer=configure), callbacks=lambda: [Unfreeze()], max_epochs=3)
    assert len(one.trainer.optimizers[0].param_groups) == 2


def test_frozen_and_unused_parameters(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.sometimes = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.scales = nn.ParameterList([torch.ones((), dtype=torch.float64) for _ in range(2)])
            self.net[0].bias.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            X, _ = batch
            large = X[:, 0] > 1.0  # in some shards none is
            loss = self.loss(batch) * self.scales[0] * self.scales[1]
            return loss + (X[large, :3] * self.sometimes).sum() / len(X) if large.any() else loss

    one, *others = assert_parity(Module)
    assert all(torch.equal(module.unused, torch.ones(3)) for module in [one, *others])
    assert all(torch.equal(module.net[0].bias, one.net[0].bias) for module in others)
    assert not torch.equal(one.sometimes, torch.ones(3))


def test_tied_parameters(Regression, assert_parity):
    def make():
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        net[2].weight = net[0].weight
        return Regression(net)

    modules = assert_parity(make)
    assert all(module.net[2].weight is module.net[0].weight for module in modules)


@pytest.mark.parametrize(
    "configure",
    [lambda m: optim.SGD(m.parameters(), 0.5, momentum=0.9), lambda m: optim.SparseAdam(m.parameters(), 0.05)],
)
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients(Regression, assert_parity, configure, bag):
    class Module(Regression):
        def __init__(self):
            net = nn.EmbeddingBag(12, 3, sparse=True) if bag else nn.Embedding(12, 3, sparse=True)
            super().__init__(net, configure)

        def loss(self, batch):
            X, y = batch
            rows = self.net((X.abs() * 4).long().clamp(max=11))
            return F.mse_loss(rows if bag else rows.sum(1), y)

    assert_parity(Module)
    assert_parity(Module, accumulate_grad_batches=3)


class Box:
    """Something of a user's that is no layer."""

    def __init__(self, weight):
        self.weight = weight


WEIGHT = torch.zeros(2, dtype=torch.float64)
LOOSE = {  # what a module has, and how its weight is reached
    "tensor": (lambda: WEIGHT.clone().requires_grad_(), lambda it: it),
    "list": (lambda: [WEIGHT.clone().requires_grad_()], lambda it: it[0]),  # the book's `params`
    "dict of tuples": (lambda: {"a": (WEIGHT.clone().requires_grad_(),)}, lambda it: it["a"][0]),
    "long list": (lambda: [WEIGHT.clone().requires_grad_() for _ in range(200)], lambda it: it[-1]),
    "list of parameters": (lambda: [nn.Parameter(WEIGHT.clone())], lambda it: it[0]),
    "object": (lambda: Box(WEIGHT.clone().requires_grad_()), lambda it: it.weight),
    "list of layers": (lambda: [nn.Linear(1, 2).double()], lambda it: it[0].bias),
}


@pytest.mark.parametrize("kind", LOOSE)
def test_parameters_that_are_not_the_modules(Regression, train, engine, kind):
    """Replicas have copies nobody would keep equal."""
    make, weight = LOOSE[kind]

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.alpha = make()

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * weight(self.alpha).exp().mean()

        def configure_optimizers(self):
            return optim.Adam([*self.parameters(), weight(self.alpha)])

    train(Module)
    train(Module, 1, strategy=engine)
    with pytest.raises(MisconfigurationException, match=r"Adam has a tensor of shape \(2,\) .* nn\.ParameterList"):
        train(Module, 2)


def test_weights_without_an_optimizer(Regression, train):
    """The book's `sgd` by hand: of tensors in a list it would leave every replica to itself."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.params = [torch.zeros(6, dtype=torch.float64, requires_grad=True)]

        def training_step(self, batch, batch_idx):
            X, y = batch
            self.manual_backward(F.mse_loss(X @ self.params[0], y[:, 0]))
            with torch.no_grad():
                self.params[0] -= 0.1 * self.params[0].grad
            self.params[0].grad = None

        def configure_optimizers(self):
            return None

    train(Module)
    with pytest.raises(MisconfigurationException, match=r"Module has a tensor of shape \(6,\) .* nn\.ParameterList"):
        train(Module, 2)


class Scaled(nn.Embedding):
    """A layer of a user's class, which replicas are given the attributes of."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag, Scaled])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_of_limited_length(Regression, assert_parity, layer, accumulate):
    """`max_norm` shortens the rows that are looked up, in whichever replica."""

    class Module(Regression):
        def __init__(self):
            super().__init__(layer(12, 3, max_norm=0.7))

        def loss(self, batch):
            X, y = batch
            rows = self.net((X.abs() * 4).long().clamp(max=11))
            return F.mse_loss(rows if layer is nn.EmbeddingBag else rows.sum(1), y)

    one, *_ = assert_parity(Module, accumulate_grad_batches=accumulate, val=True)
    assert "forward" not in vars(one.net)


def test_buffers_updated_in_the_step(Regression, assert_parity, make_loader):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_steps", torch.tensor(0))
            self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float64))
            self.register_buffer("nothing", None)

        def training_step(self, batch, batch_idx):
            self.num_steps += 1
            self.scale = self.scale * 0.99  # a new tensor every time
            return self.loss(batch) * self.scale

    one, *_ = assert_parity(Module)
    assert one.num_steps == 8
    assert_parity(Module, (3, 4), loader=make_loader(2))  # most replicas see no sample, and others need their buffers


def test_buffers_that_follow_the_data(Regression, train):
    """All replicas begin a step with the first one's, as in `DistributedDataParallel` and under `dp`."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(3, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            X, y = batch
            loss = F.mse_loss(self.net(X) - self.center, y)
            self.center.lerp_(y.mean(0), 0.5)
            return loss

    dp, manual = (train(Module, 2, strategy=strategy) for strategy in ("dp", "manual_allreduce"))
    for a, b in zip(dp.state_dict().values(), manual.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_spectral_norm(Regression, assert_parity):
    """Its buffers follow from the weights; those of a replica without samples must not lag behind."""

    def make():
        return Regression(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3)))

    assert_parity(make)


def test_what_hooks_set_between_steps(Regression, assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
            self.factor = 1.0

        def on_train_epoch_start(self):
            self.weights = torch.arange(1.0, 4.0, dtype=torch.float64, device=self.device) + self.current_epoch

        def on_train_batch_end(self, *_):
            self.temperature.mul_(0.95)
            self.factor *= 1.02

        def training_step(self, batch, batch_idx):
            X, y = batch
            return ((self.net(X) - y).square() * self.weights).mean() * self.temperature * self.factor

    assert_parity(Module)


def test_lazy_layers_are_refused(Regression, train):
    class Module(Regression):
        def __init__(self):
            super().__init__(nn.LazyLinear(3))

    with pytest.raises(ValueError, match="lazy"):
        train(Module, 2)
