"""BatchNorm: statistics of replicas' shards, averaged; or of the whole batch, as on one device."""

import pytest
import torch
from lightning.pytorch import Callback
from tiny_runs import (
    Manual,
    Regression,
    a_loader,
    assert_close,
    batch_norm_net,
    make_strategy,
    same_bits,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric


def net2d(norm=nn.BatchNorm2d, **options):
    return nn.Sequential(
        nn.Conv2d(2, 4, 2), norm(4, **options), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )


IMAGES = {"loader": lambda: a_loader(shape=(2, 3, 2)), "sync_batchnorm": True}
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.5, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_synchronised(assert_parity, options, base):
    """Running statistics, validation. In 2d one sample can be normalised, by few replicas, too."""
    no_single = {"limit_train_batches": 3, "limit_val_batches": 3}
    assert_parity(
        lambda: base(batch_norm_net(**options)), (3,), sync_batchnorm=True, val=True, **no_single
    )
    assert_parity(lambda: base(net2d(**options)), (2,), val=True, **IMAGES)


class Activated(nn.BatchNorm2d):
    """Does more than normalise, as timm's `BatchNormAct2d`."""

    def forward(self, X):
        is_training = self.training or self.running_mean is None
        args = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(X, *args, training=is_training, momentum=0.2).tanh()


def test_a_layer_of_ones_own_synchronised(assert_parity):
    """In accumulation windows, too."""
    assert_parity(
        lambda: Regression(net2d(Activated)), val=True, accumulate_grad_batches=2, **IMAGES
    )


def test_a_layer_that_a_metric_holds_too(assert_parity):
    """As FID's features: it is the module's, and has replicas."""

    class Module(Regression):
        def __init__(self):
            super().__init__(batch_norm_net())
            self.metric = MeanMetric()
            self.metric.features = self.net

    assert_parity(Module, (3,), sync_batchnorm=True, limit_train_batches=3)


def test_a_synchronised_run_can_be_repeated_bit_by_bit(train):
    """With one autograd thread per device, replicas exchange values in any order."""

    def make():
        return Regression(
            nn.Sequential(batch_norm_net(), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        )

    first, *others = (train(make, 3, sync_batchnorm=True, limit_train_batches=3) for _ in range(3))
    assert all(same_bits(first, other) for other in others)


def test_synchronised_images_in_half_precision(assert_parity):
    """Far from zero no digit is lost: moments are computed in float32."""

    class Half(Regression):
        def __init__(self):
            super().__init__(net2d())
            self.float()

        def loss(self, batch):
            Z = self.net[1]((self.net[0](batch[0].float()) + 50).bfloat16())
            return (self.net[2:](Z.float())[:, :3] - batch[1].float()).square().mean()

    assert_parity(Half, tolerance=0.02, **IMAGES)


def test_what_synchronisation_refuses(train):
    """One value a channel as one device; the rest in one line."""

    class Checkpointed(Regression):
        def training_step(self, batch, batch_idx):
            return checkpoint(self.loss, batch, use_reentrant=False)

    class Penalized(Regression):
        def training_step(self, batch, batch_idx):
            X = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(X).sum(), X, create_graph=True)
            return self.loss(batch) + gradient.square().mean()

    class Transformed(Regression):
        def training_step(self, batch, batch_idx):
            gradient = torch.func.grad(lambda X: self.net(X).sum())(batch[0])
            return self.loss((batch[0] + gradient.detach(), batch[1]))

    def compiled():
        module = Regression(batch_norm_net())
        module.net.compile(backend="eager")
        return module

    for make, said in (
        (lambda: Regression(batch_norm_net()), "more than 1 value per channel"),
        # of GPUs, torch
        (lambda: Checkpointed(batch_norm_net()), "activation checkpointing|on the same device"),
        (compiled, "compiled layers"),
        (lambda: Penalized(batch_norm_net()), "gradients of what replicas have exchanged"),
        (
            lambda: Transformed(batch_norm_net(track_running_stats=False)),
            "gradients of what replicas have exchanged",
        ),
    ):
        with pytest.raises(Exception, match=said):
            train(make, 2, sync_batchnorm=True)


class Parted(Regression):
    """Normalises some samples in one layer, others in another one, and none in a third."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(3)]).double()

    def loss(self, batch):
        X, y = batch
        Z, is_second = torch.zeros_like(X), X[:, 1:].sum(1) > 2
        for norm, chosen in zip(self.norms, (~is_second, is_second, is_second & ~is_second)):
            Z[chosen] = norm(X[chosen])
        return F.mse_loss(self.net(Z), y)


def test_a_layer_of_some_samples(assert_parity):
    """A shard may have none of them."""
    assert_parity(Parted, (3,), sync_batchnorm=True, val=True, limit_train_batches=3)


def test_replicas_meet_in_the_same_layer(train):
    class Module(Parted):
        def loss(self, batch):
            return self.norms[int(batch[0][0, 0] > 0)](batch[0]).square().mean()

    with pytest.raises(RuntimeError, match=r"at BatchNorm norms\.\d.*at BatchNorm norms\.\d"):
        train(Module, 4, sync_batchnorm=True)


class Fixed(Regression):
    """Of the input: its running mean is linear in the batches', so averaged it is one device's."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(6))
        self.fixed = nn.Linear(6, 3).double()

    def loss(self, batch):
        return self.fixed(self.net(batch[0])).square().mean()


class Looks(Callback):
    """At the statistics, in validation and in a checkpoint of the middle of an epoch."""

    def __init__(self, path):
        self.path, self.means, self.variances = path, [], []

    def look(self, state):
        self.means.append(state["net.running_mean"].clone().cpu())
        self.variances.append(state["net.running_var"].clone().cpu())

    def on_validation_start(self, trainer, module):
        self.look(module.state_dict())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)
            self.look(torch.load(self.path, weights_only=True)["state_dict"])


@pytest.mark.parametrize("base", [Fixed, type("FixedManual", (Fixed, Manual), {})])
@pytest.mark.parametrize("split", [None, [0.75, 0.25]])
def test_own_statistics_are_averaged(train, engine, split, tmp_path, base):
    """Weighted by samples, at every look. The variance is less than between them all."""
    kwargs = {"val": True, "limit_train_batches": 3}
    looks = [Looks(tmp_path / f"{k}.ckpt") for k in (1, 2)]
    strategies = (None, make_strategy(engine, split=split))
    runs = zip((1, 2), strategies, looks)
    one, two = (
        train(base, k, strategy, lambda look=look: [look], **kwargs) for k, strategy, look in runs
    )
    assert_close(looks[1].means, looks[0].means)
    assert all(
        (own != expected).all() for own, expected in zip(looks[1].variances, looks[0].variances)
    )
    assert torch.equal(two.net.num_batches_tracked.cpu(), one.net.num_batches_tracked.cpu())


def test_a_shard_of_one_sample(train):
    """Refused, as by torch, where one device has two samples; synchronised BatchNorm is right."""
    loader = lambda: a_loader(2, 6)  # noqa: E731
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train(lambda: Regression(batch_norm_net()), 2, loader=loader)
    one, two = (
        train(lambda: Regression(batch_norm_net()), k, loader=loader, sync_batchnorm=True)
        for k in (1, 2)
    )
    assert_close(two.state_dict(), one.state_dict(), 1e-7, 1e-9)
