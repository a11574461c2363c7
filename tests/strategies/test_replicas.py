"""The option `replicas`: trained weights are the same bits on any number of devices of one kind."""

import pytest
from tiny_runs import MANUAL, Manual, Regression, a_loader, make_strategy, relative_error, same_bits
from torch import nn, optim

REPLICAS = 4
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)
BASES = pytest.mark.parametrize("base", [Regression, Manual])


def configure(module):
    optimizer = optim.AdamW(module.parameters(), 0.02)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def everything(base):
    """Dropout, BatchNorm, AdamW and a scheduler, which manual optimization steps by hand."""

    class Module(base):
        def __init__(self):
            layers = [
                nn.Linear(6, 16),
                nn.BatchNorm1d(16),
                nn.Dropout(0.3),
                nn.Tanh(),
                nn.Linear(16, 3),
            ]
            super().__init__(nn.Sequential(*layers), configure)

        def update(self, loss):
            super().update(loss)
            self.lr_schedulers().step()

    return Module


@pytest.fixture
def replicated(train):
    """Three epochs of 4 batches on any number of devices; 2 samples per replica but in the last."""

    def replicated(make, k, replicas=REPLICAS, **kwargs):
        kwargs = {"loader": lambda: a_loader(16, 58), "max_epochs": 3, "check": False, **kwargs}
        return train(make, k, make_strategy(MANUAL, replicas=replicas), **kwargs)

    return replicated


@BASES
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"sync_batchnorm": True},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "max_epochs": 2},
        {"val": True, "val_check_interval": 2},
    ],
    ids=["", "sync", "clip, accumulate", "validate"],
)
def test_same_bits_on_1_2_and_4_devices(replicated, base, kwargs):
    if base is Manual and "gradient_clip_val" in kwargs:
        pytest.skip("Lightning does not clip in manual optimization")
    one, *others = (replicated(everything(base), k, **kwargs) for k in (1, 2, 4))
    assert all(same_bits(one, other) for other in others)
    # whose number counts
    assert not same_bits(one, replicated(everything(base), 2, replicas=2, **kwargs))


def test_small_batches_and_idle_replicas(replicated):
    """A batch of five and of one for four replicas."""
    layers = lambda: (nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))  # noqa: E731
    make = lambda: Regression(nn.Sequential(*layers()), configure)  # noqa: E731
    one, *others = (replicated(make, k, loader=lambda: a_loader(5, 16)) for k in (1, 2, 4))
    assert all(same_bits(one, other) for other in others)


@BASES
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (4, 2)])
def test_resumed_on_other_devices(replicated, tmp_path, before, after, base):
    """After an epoch, to the same bits. There is nothing to save but Lightning's checkpoint."""
    whole = replicated(everything(base), 2)
    first = replicated(everything(base), before, max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    assert same_bits(whole, replicated(everything(base), after, ckpt_path=tmp_path / "epoch.ckpt"))


@BASES
@pytest.mark.parametrize("k", [1, 2])
def test_the_training_is_one_devices(replicated, train, k, base):
    """Up to the order of sums, where nothing depends on the shard."""
    make = lambda: base(optimizer=lambda m: optim.Adam(m.parameters(), 0.01))  # noqa: E731
    one, many = train(make, loader=lambda: a_loader(16, 58), max_epochs=3), replicated(make, k)
    assert relative_error(many, one) < 1e-10
