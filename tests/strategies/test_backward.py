"""Autograd Functions that look at a layer again in the backward pass find the replica's own."""

import pytest
import torch
from tiny_runs import Manual, Regression, a_loader, batch_norm_net, make_strategy
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MODES = {
    "plain": (Regression, {}, {}),
    "sync_batchnorm": (Regression, {}, {"sync_batchnorm": True}),
    "lockstep": (Regression, {"lockstep": True}, {}),
    "both": (Regression, {"lockstep": True}, {"sync_batchnorm": True}),
    "manual": (Manual, {}, {}),
    "manual, sync_batchnorm": (Manual, {}, {"sync_batchnorm": True}),
    "accumulated": (Regression, {}, {"accumulate_grad_batches": 2}),
}


class Again(torch.autograd.Function):
    """Keeps a layer, and computes what it does again in the backward pass, as adjoint methods."""

    @staticmethod
    def forward(ctx, x, layer, *weights):
        ctx.layer = layer
        ctx.save_for_backward(x, *weights)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            z = ctx.layer(x)
            found = torch.autograd.grad(z, (x, *weights), gradient, allow_unused=True)
        return found[0], None, *found[1:]


def again(layer, x):
    return Again.apply(x, layer, *layer.parameters())


@pytest.fixture
def assert_equal_to_one_device(assert_parity, engine):
    """A module of these methods, derived from what the mode says, is trained as by one device."""

    def check(mode, **methods):
        base, options, settings = MODES[mode]
        module = type("Module", (base,), methods)
        strategy = lambda: make_strategy(engine, **options)  # noqa: E731
        assert_parity(module, (2, 3), strategy=strategy, check=False, **settings)

    return check


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_is_computed_again(assert_equal_to_one_device, mode):
    def loss(self, batch):
        return F.mse_loss(again(self.net, batch[0]), batch[1])

    assert_equal_to_one_device(mode, loss=loss)


def build(self):
    Regression.__init__(self)
    self.encoder = nn.Linear(6, 6)
    self.automatic_optimization = not isinstance(self, Manual)
    self.double()


def encode(self, batch, dataloader_idx):
    return self.encoder(batch[0]), batch[1]


def encode_twice(self, batch, dataloader_idx):
    """Two tensors of one graph, and an unused one."""
    Z = self.encoder(batch[0])
    return Z, (Z * 2).sigmoid(), Z.square(), batch[1]


def loss_of_a_graph(self, batch):
    return F.mse_loss(again(self.net, batch[0]), batch[-1])


def loss_of_two_graphs(self, batch):
    return F.mse_loss(again(self.net, batch[0] * batch[1]), batch[-1])


GRAPHS = {"one": (encode, loss_of_a_graph), "two": (encode_twice, loss_of_two_graphs)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_batch_with_a_graph(assert_equal_to_one_device, graph, mode):
    """A hook encodes the whole batch: the weights of the encoder learn, too."""
    hook, loss = GRAPHS[graph]
    methods = {"__init__": build, "on_after_batch_transfer": hook, "loss": loss}
    assert_equal_to_one_device(mode, **methods)


@pytest.mark.parametrize("base", [Regression, Manual])
def test_refused_where_batch_norm_makes_one_graph(trainer_on, base):
    class Module(base):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def loss(self, batch):
            return F.mse_loss(self.norm(again(self.net, batch[0])), batch[1])

    with pytest.raises(RuntimeError, match="sync_batchnorm") as error:
        trainer_on(2, sync_batchnorm=True).fit(Module(), a_loader(8, 24))
    assert "\n" not in str(error.value)


AGAIN = {  # what a checkpointed function does, which replicas have met for or do differently
    "BatchNorm": lambda module, Z: module.norm(Z).sin(),  # reentrant: at first without gradients
    "a reduction": lambda module, Z: Z * module.trainer.strategy.reduce(Z.detach().mean()),
    "its rank": lambda module, Z: (Z * module.global_rank).sin(),
    "an attribute": lambda module, Z: Z * module.mask,
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("what", AGAIN)
def test_a_step_that_has_met_is_not_computed_again(trainer_on, engine, what, base, use_reentrant):
    class Module(base):
        def __init__(self):
            super().__init__(batch_norm_net() if what == "an attribute" else None)
            self.norm = nn.BatchNorm1d(3, affine=False).double()

        def loss(self, batch):
            self.mask = batch[0][:, :3] > 0
            Z = self.net(batch[0])
            again = checkpoint(AGAIN[what], self, Z, use_reentrant=use_reentrant)
            return F.mse_loss(Z, batch[1]) + again.square().mean()

    strategy = make_strategy(engine, lockstep=True)
    with pytest.raises(RuntimeError, match=r"The backward pass computes .* again") as error:
        trainer_on(2, strategy=strategy, sync_batchnorm=True).fit(Module(), a_loader(8, 24))
    assert "\n" not in str(error.value)
