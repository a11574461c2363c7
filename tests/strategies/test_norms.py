"""BatchNorm: statistics of each replica's shard, combined when somebody looks; or of the whole batch, as one device."""

import contextlib
from types import MethodType

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_mgpu.strategies import ManualAllreduceStrategy

pytestmark = pytest.mark.slow


def bn1d(**kwargs):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **kwargs), nn.Tanh(), nn.Linear(8, 3))


def bn2d(**kwargs):
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, **kwargs), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.5, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
]
WITHOUT_THE_SINGLE_SAMPLE = {"limit_train_batches": 3, "limit_val_batches": 3}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_synchronised(Regression, assert_parity, options, dimensions):
    """To 1e-10, running statistics too. In 2d a batch of one sample can be normalised, also by fewer replicas."""
    if dimensions == 1:
        modules = assert_parity(
            lambda: Regression(bn1d(**options)), sync_batchnorm=True, val=True, **WITHOUT_THE_SINGLE_SAMPLE
        )
    else:
        modules = assert_parity(lambda: Regression(bn2d(**options)), sync_batchnorm=True, val=True, shape=(2, 3, 2))
    losses = [module.trainer.callback_metrics["val_loss"] for module in modules]
    # without running statistics a layer needs the whole batch in validation, too
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "kwargs", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "64-true"}]
)
def test_synchronised_with(Regression, assert_parity, kwargs):
    modules = assert_parity(lambda: Regression(bn2d()), sync_batchnorm=True, shape=(2, 3, 2), **kwargs)
    assert not any("forward" in vars(module.net[1]) for module in modules)  # left as they were


def test_a_synchronised_run_can_be_repeated_bit_by_bit(Regression, train):
    """Where autograd has a thread a device, what replicas give back to each other comes in any order."""

    def make():
        return Regression(nn.Sequential(bn1d(), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    runs = [train(make, 3, sync_batchnorm=True, limit_train_batches=3).state_dict() for _ in range(4)]
    assert all(torch.equal(run[name], value) for run in runs for name, value in runs[0].items())


class Activated(nn.BatchNorm2d):
    """Does more than normalise, as timm's `BatchNormAct2d`."""

    def forward(self, X):
        return torch.tanh(super().forward(X))


def square(layer, X):
    return type(layer).forward(layer, X).square()


def of_a_users_class():
    return Activated(4)


def patched():
    layer = nn.BatchNorm2d(4)
    layer.forward = MethodType(square, layer)
    return layer


def patched_and_of_a_users_class():
    layer = Activated(4)
    layer.forward = MethodType(square, layer)
    return layer


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("make", [of_a_users_class, patched, patched_and_of_a_users_class])
def test_layers_that_do_more(Regression, assert_parity, make, sync):
    """Each replica has a layer of its own, and what it does stays; without `sync`, of the layers in evaluation mode."""

    class Module(Regression):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Conv2d(2, 4, 2), make(), nn.Flatten(), nn.Linear(8, 3)))

        def on_train_epoch_start(self):
            self.net[1].train(sync)

    for module in assert_parity(Module, sync_batchnorm=sync, shape=(2, 3, 2), val=True):
        forward = vars(module.net[1]).get("forward")  # as it was
        assert forward is None if make is of_a_users_class else forward.__func__ is square
        assert module.net[1].num_batches_tracked == (8 if sync else 0)


def test_synchronised_in_eval_mode(Regression, assert_parity):
    class Module(Regression):
        def on_train_epoch_start(self):
            self.net[1].train(self.current_epoch != 1)

    assert_parity(lambda: Module(bn2d()), sync_batchnorm=True, shape=(2, 3, 2), max_epochs=3)


def test_synchronised_refuses_a_single_value(Regression, train):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train(lambda: Regression(bn1d()), 2, sync_batchnorm=True)  # as one device does


def test_other_norms_are_left_alone(Regression, assert_parity):
    def make():
        norm = nn.InstanceNorm2d(4, affine=True)
        return Regression(nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Flatten(), nn.Linear(8, 3)))

    assert_parity(make, shape=(2, 3, 2))
    assert_parity(make, shape=(2, 3, 2), sync_batchnorm=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_running_statistics_of_instance_norm(Regression, assert_parity, accumulate):
    """They are means over samples: those of one device, whatever the shards; in evaluation mode nobody touches them."""

    class Module(Regression):
        def __init__(self):
            norm = nn.InstanceNorm2d(4, track_running_stats=True)
            super().__init__(nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Flatten(), nn.Linear(8, 3)))

        def on_train_epoch_start(self):
            self.net[1].train(self.current_epoch != 1)

    modules = assert_parity(Module, shape=(2, 3, 2), max_epochs=3, accumulate_grad_batches=accumulate, val=True)
    losses = [module.trainer.callback_metrics["val_loss"] for module in modules]
    torch.testing.assert_close(losses, losses[:1] * len(losses), rtol=1e-10, atol=0)


def test_synchronised_under_checkpointing_is_refused(Regression, train):
    class Module(Regression):
        def training_step(self, batch, batch_idx):
            return torch.utils.checkpoint.checkpoint(self.loss, batch, use_reentrant=False)

    with pytest.raises(RuntimeError, match="activation checkpointing"):
        train(lambda: Module(bn1d()), 2, sync_batchnorm=True)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_nobody_gets_a_single_sample(Regression, assert_parity, make_loader, batch_size):
    """The second device would get all of them; the first never goes without: it gets all."""
    assert_parity(
        lambda: Regression(bn1d(track_running_stats=False)),
        (2,),
        strategy=lambda: ManualAllreduceStrategy(split=[0.1, 0.9]),
        loader=make_loader(batch_size, num_samples=6),
    )


@pytest.fixture
def Fixed(Regression):
    """BatchNorm of the input: its running mean is linear in the batches', so combined it equals one device's."""

    class Module(Regression):
        def __init__(self):
            super().__init__(nn.BatchNorm1d(6))
            self.fixed = nn.Linear(6, 3).double()

        def loss(self, batch):
            return self.fixed(self.net(batch[0])).square().mean()

    return Module


@pytest.mark.parametrize("split", [None, [0.75, 0.25]])
@pytest.mark.parametrize("watched", [False, True])
def test_own_statistics_are_combined(Fixed, train, split, watched):
    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            """A hook that could edit weights: the strategy then copies them every step, but not the statistics."""

    seen = []

    class Module(Fixed):
        def on_validation_epoch_start(self):
            seen.append({key: value.clone() for key, value in self.net.state_dict().items() if "running" in key})

        def on_save_checkpoint(self, checkpoint):
            seen.append({key[4:]: value.clone() for key, value in checkpoint["state_dict"].items() if "running" in key})

    kwargs = {"val": True, "limit_train_batches": 3, "callbacks": lambda: [Watch()] if watched else []}
    one = train(Module, **kwargs)
    num = len(seen)
    two = train(Module, 2, strategy=ManualAllreduceStrategy(split=split), **kwargs)
    for expected, combined in zip(seen[:num], seen[num:]):
        torch.testing.assert_close(combined["running_mean"], expected["running_mean"], rtol=1e-10, atol=1e-13)
        assert (combined["running_var"] != expected["running_var"]).all()  # less than between all samples
    assert torch.equal(two.net.num_batches_tracked, one.net.num_batches_tracked)


def test_combined_in_the_middle_of_an_epoch(Fixed, train, tmp_path):
    """A checkpoint combines; the run goes on as if it had not."""

    class Save(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / f"{trainer.num_devices}.ckpt")

    one, plain, saving = (
        train(Fixed, k, limit_train_batches=3, callbacks=lambda save=save: [Save()] if save else [])
        for k, save in ((1, True), (2, False), (2, True))
    )
    for module in (plain, saving):
        torch.testing.assert_close(module.net.running_mean, one.net.running_mean, rtol=1e-12, atol=1e-14)
    state, expected = (torch.load(tmp_path / f"{k}.ckpt", weights_only=True)["state_dict"] for k in (2, 1))
    assert state.keys() == expected.keys()
    torch.testing.assert_close(state["net.running_mean"], expected["net.running_mean"], rtol=1e-12, atol=1e-14)


def test_statistics_set_by_others(Fixed, train):
    """Reset at the start of an epoch, replaced for validation: in every replica."""

    class Module(Fixed):
        def on_train_epoch_start(self):
            self.net.reset_running_stats()

    class Replace(Callback):
        def on_validation_start(self, trainer, module):
            module.net.running_mean.fill_(0.3)

    one, two = (train(Module, k, limit_train_batches=3) for k in (1, 2))
    torch.testing.assert_close(two.net.running_mean, one.net.running_mean, rtol=1e-12, atol=1e-14)
    one, two = (train(Fixed, k, limit_train_batches=3, val=True, callbacks=lambda: [Replace()]) for k in (1, 2))
    assert torch.equal(two.net.running_mean, torch.full((6,), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("k", [2, 3])
def test_devices_go_without_rather_than_get_a_single_sample(Regression, train, make_loader, k):
    """One device normalises a batch of two or three samples, so several do: BatchNorm refuses a single one."""

    sizes = []

    class Sizes(Regression):
        def training_step(self, batch, batch_idx):
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    for num_samples in (2, 3, 5):
        sizes.clear()
        train(lambda: Sizes(bn1d()), k, loader=make_loader(8, num_samples), max_epochs=1, check=False)
        assert sum(sizes) == num_samples and min(sizes) > 1


def test_statistics_of_a_replica_without_samples_do_not_count(Regression, train, make_loader):
    """Batches too small to share are one replica's, and so are their statistics."""
    loader = make_loader(2, num_samples=10)
    one, *others = [train(lambda: Regression(bn1d()), k, loader=loader).net[1].state_dict() for k in (1, 2, 3)]
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-10, atol=0)


def test_statistics_count_with_the_samples_of_a_replica(Regression, train, make_loader):
    """Of batches of 8 each has 4, and of those of 2 the first has both."""
    loader = make_loader(8, num_samples=10)
    module = train(
        lambda: Regression(bn1d(), lambda module: torch.optim.SGD(module.parameters(), 0.0)), 2, loader=loader
    )
    first, second = (nn.BatchNorm1d(8).double() for _ in range(2))
    for X, _ in [*loader, *loader]:
        h = module.net[0](X).detach()
        first(h[:4])
        if len(h) == 8:
            second(h[4:])
    for name in ("running_mean", "running_var"):
        expected = (12 * getattr(first, name) + 8 * getattr(second, name)) / 20
        torch.testing.assert_close(getattr(module.net[1], name), expected, rtol=1e-10, atol=0)


def test_statistics_after_an_error(Regression, train):
    class Failing(Callback):
        __module__ = "lightning.checks"

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if fails and trainer.global_step == 2:
                raise KeyboardInterrupt

    modules = []
    for fails in (False, True):

        def make():
            modules.append(Regression(bn1d()))
            return modules[-1]

        with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
            train(make, 2, callbacks=lambda: [Failing()], max_steps=2, limit_train_batches=3)
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-12, atol=0)
